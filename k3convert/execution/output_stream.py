"""One item's bytes on their way to the destination: filled in place, written in pieces."""

from __future__ import annotations

from k3convert.execution.open_files import DestinationFiles


class OutputStream:
    """A reused buffer over one contiguous destination range.

    An operation asks for room, fills it and advances; small neighbours leave in one write.
    """

    def __init__(self, destinations: DestinationFiles, piece_bytes: int) -> None:
        self._destinations = destinations
        self._buffer = memoryview(bytearray(piece_bytes))
        self._file = self._offset = self._filled = 0
        self.discarding = False
        self.written_bytes = 0

    def begin(self, file: int, offset: int) -> None:
        """Start at ``offset`` of a destination file."""
        self._file, self._offset, self._filled = file, offset, 0

    def room(self, wanted: int, multiple: int = 1) -> memoryview:
        """A view of at most ``wanted`` bytes to fill, a multiple of ``multiple`` bytes long."""
        free = len(self._buffer) - self._filled
        if free < min(wanted, multiple) or free == 0:
            self.flush()
            free = len(self._buffer)
        nbytes = min(wanted, free)
        nbytes -= nbytes % multiple
        assert nbytes > 0, f"a buffer of {len(self._buffer)} bytes cannot take {multiple} at once"
        return self._buffer[self._filled : self._filled + nbytes]

    def advance(self, nbytes: int) -> None:
        """Keep the first ``nbytes`` of the view given last."""
        self._filled += nbytes

    def put(self, data: bytes) -> None:
        """Append constant bytes."""
        start = 0
        while start < len(data):
            view = self.room(len(data) - start)
            view[:] = data[start : start + len(view)]
            self.advance(len(view))
            start += len(view)

    def flush(self) -> None:
        """Write what is filled."""
        if self._filled and not self.discarding:
            self._destinations.write_at(self._file, self._buffer[: self._filled], self._offset)
        self.written_bytes += self._filled
        self._offset += self._filled
        self._filled = 0
