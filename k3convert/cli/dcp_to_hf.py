"""``k3convert dcp-to-hf``."""

from __future__ import annotations

NAME = "dcp-to-hf"


def command() -> int:
    """To come."""
    return 0
