"""Convert, validate and smoke-train Kimi K3 checkpoints."""

from k3convert.version import __version__

__all__ = ["__version__"]
