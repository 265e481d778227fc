"""The network on several processes: layouts, meshes and what each axis does to a module."""
