"""The process's memory, and how it is shared out."""

from __future__ import annotations

import os
import re

DEFAULT_LIMIT_BYTES = 1 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of ``512M``, ``1.5G``, ``2GiB`` or a plain number; units are powers of 1024.

    Raises:
        ValueError: not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a size; examples: 512M, 1.5G, 160MiB")
    return int(float(found["number"]) * _UNITS[found["unit"].upper()])


def format_size(nbytes: float) -> str:
    """Bytes for a person: ``1.45 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def resident_bytes() -> int:
    """What this process holds in memory now, mapped files included."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that this process ever held in memory."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resident_bytes()
