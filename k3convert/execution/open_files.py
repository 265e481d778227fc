"""File descriptors shared by the workers, and exact reads and writes at offsets."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

from k3convert.errors import BadInput, NotPossibleHere
from k3convert.planning.plan import DestinationFile, SourceFile

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may: a checkpoint may have thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class SourceFiles:
    """Sources opened on first use and kept open."""

    def __init__(self, sources: Sequence[SourceFile]) -> None:
        allow_many_files()
        self._sources = sources
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()

    def path(self, source: int) -> str:
        """The path of a source."""
        return self._sources[source].path

    def descriptor(self, source: int) -> int:
        """A read-only descriptor of a source.

        Raises:
            BadInput: the file has gone, or has another size than when the plan was made.
        """
        found = self._descriptors.get(source)
        if found is not None:
            return found
        with self._lock:
            if source in self._descriptors:
                return self._descriptors[source]
            expected = self._sources[source]
            try:
                descriptor = os.open(expected.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if error.errno in TOO_MANY_FILES:
                    raise NotPossibleHere(
                        f"{expected.path} cannot be opened: {error.strerror} ({len(self._descriptors)} are open)",
                        hint=f"raise the limit for this shell: ulimit -n {2 * len(self._sources) + 1024}",
                    ) from error
                raise BadInput(f"{expected.path} cannot be opened: {error.strerror}") from error
            nbytes = os.fstat(descriptor).st_size
            if nbytes != expected.nbytes:
                os.close(descriptor)
                raise BadInput(f"{expected.path} has {nbytes} bytes, it had {expected.nbytes}: it changed")
            self._descriptors[source] = descriptor
            return descriptor

    def read_into(self, source: int, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``offset`` of a source.

        Raises:
            BadInput: the file ends too early, or cannot be read.
        """
        descriptor = self._descriptors.get(source)
        if descriptor is None:
            descriptor = self.descriptor(source)
        done, wanted = 0, len(view)
        while done < wanted:
            try:
                count = os.preadv(descriptor, (view[done:],), offset + done)
            except OSError as error:
                raise BadInput(f"{self.path(source)}: reading at byte {offset + done}: {error.strerror}") from error
            if not count:
                raise BadInput(f"{self.path(source)} ends at byte {offset + done}, {wanted - done} bytes too early")
            done += count

    def close(self) -> None:
        """Close everything."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class DestinationFiles:
    """Destinations opened on first use at their final size, and synced on demand."""

    def __init__(self, folder: Path, files: Sequence[DestinationFile]) -> None:
        self._folder, self._files = folder, files
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()

    def descriptor(self, file: int) -> int:
        """A descriptor to write to; the file is created with its final size."""
        found = self._descriptors.get(file)
        if found is not None:
            return found
        with self._lock:
            if file in self._descriptors:
                return self._descriptors[file]
            name, nbytes = self._files[file]
            descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(descriptor).st_size != nbytes:
                os.ftruncate(descriptor, nbytes)
            self._descriptors[file] = descriptor
            return descriptor

    def write_at(self, file: int, view: memoryview, offset: int) -> None:
        """Write all of ``view`` at ``offset``."""
        descriptor = self.descriptor(file)
        done = 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], offset + done)

    def sync(self, files: set[int]) -> None:
        """Flush these files to the device."""
        for file in files:
            os.fsync(self.descriptor(file))

    def close(self) -> None:
        """Close everything."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
