"""``k3convert verify``."""

from __future__ import annotations

NAME = "verify"


def command() -> int:
    """To come."""
    return 0
