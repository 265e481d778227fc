"""One folder an op; see ``k3kernels.registry``."""
