"""``k3convert inspect``."""

from __future__ import annotations

NAME = "inspect"


def command() -> int:
    """To come."""
    return 0
