"""File names that a checkpoint names, kept inside its folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from k3convert.errors import PathEscape


def unsafe_reason(name: object) -> str | None:
    """Why a file name inside a checkpoint may not be joined to its folder, or None."""
    if not isinstance(name, str) or not name:
        return "is not a file name"
    if "\0" in name:
        return "contains a NUL character"
    if "\\" in name or ":" in name:
        return "contains a backslash or a colon"
    if any(ord(character) < 32 for character in name):
        return "contains a control character"
    if any(0xD800 <= ord(character) < 0xE000 for character in name):
        return "is not UTF-8 text"
    path = PurePosixPath(name)
    if path.is_absolute() or name.startswith("~"):
        return "is an absolute path"
    if any(part in ("..", ".") for part in name.split("/")) or "//" in name:
        return "leaves the folder or has dot segments"
    return None


def resolve_member(folder: Path, name: str) -> Path:
    """Join ``name`` to ``folder`` and follow links, staying inside the folder or the hub cache it belongs to.

    A file of a hub cache (``<repo>/snapshots/<revision>/<name>``) is a link into ``<repo>/blobs``; that is allowed.

    Raises:
        PathEscape: the name or the link's target leaves the folder.
    """
    if reason := unsafe_reason(name):
        raise PathEscape(f"{folder}: the file name {name!r} {reason}")
    path = folder / name
    target = Path(os.path.realpath(path))
    for root in _allowed_roots(folder):
        if target.is_relative_to(root):
            return path
    raise PathEscape(f"{path} is a link to {target}, outside the checkpoint folder")


def _allowed_roots(folder: Path) -> list[Path]:
    roots = [folder.resolve()]
    for parent in {folder.absolute().parent, folder.resolve().parent}:
        if parent.name == "snapshots":
            roots.append((parent.parent / "blobs").resolve())
    return roots
