"""Opening files that a checkpoint names: regular files only, so that no pipe is waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; links are followed.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file", str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: see ``open_regular``.
    """
    with open_regular(path) as file:
        return file.read()


def why_unreadable(path: Path, error: OSError) -> str:
    """What is wrong with a file that could not be opened, for a sentence that begins with its name."""
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read: {error.strerror or error}"
    return "is a link whose target is missing (interrupted download)" if path.is_symlink() else "is missing"
