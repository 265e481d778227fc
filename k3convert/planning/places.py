"""Where a conversion may write: never over its own source."""

from __future__ import annotations

from pathlib import Path

from k3convert.errors import UsageError


def check_places(source: Path, destination: Path) -> None:
    """Refuse a destination that is the source, lies inside it or holds it.

    Raises:
        UsageError: reading and writing would meet.
    """
    read, written = source.resolve(), destination.resolve()
    if read == written:
        raise UsageError(f"{destination} is the source itself")
    if read in written.parents:
        raise UsageError(f"{destination} lies inside the source {source}", hint="write beside it")
    if written in read.parents:
        raise UsageError(f"{destination} holds the source {source}", hint="write beside it")
