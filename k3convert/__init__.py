"""Convert, validate and smoke-train Kimi K3 checkpoints."""

from __future__ import annotations

from typing import Any

from k3convert.version import __version__

__all__ = ["__version__", "load_model", "to_hf_state_dict"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name in ("load_model", "to_hf_state_dict"):
        from k3convert import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
