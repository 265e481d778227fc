"""Where a conversion may write: never over what it reads."""

from __future__ import annotations

from pathlib import Path

from k3convert.errors import UsageError


def partial_path(destination: Path) -> Path:
    """The folder in which the result of ``destination`` grows; it is removed at the end.

    Raises:
        UsageError: the destination has no name of its own, as ``.`` and ``/`` have none.
    """
    if not destination.name:
        raise UsageError(f"{destination} is no name for a new folder")
    return destination.with_name(destination.name + ".partial")


def check_places(read: Path, destination: Path, *, what: str = "source") -> None:
    """Refuse a destination that is what is read, lies inside it or holds it; likewise for its partial folder.

    Raises:
        UsageError: reading and writing would meet.
    """
    inside = read.resolve()
    for path in (destination, partial_path(destination)):
        written = path.resolve()
        if inside == written:
            raise UsageError(f"{path} is the {what} itself", hint="write beside it, under another name")
        if inside in written.parents:
            raise UsageError(f"{path} lies inside the {what} {read}", hint="write beside it")
        if written in inside.parents:
            raise UsageError(f"{path} holds the {what} {read}", hint="write beside it")
