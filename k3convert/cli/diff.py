"""``k3convert diff``."""

from __future__ import annotations

NAME = "diff"


def command() -> int:
    """To come."""
    return 0
