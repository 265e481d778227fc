"""Mesh axes and slices."""
