"""One item's bytes on their way to the destination: filled in place, written behind by a thread of its own."""

from __future__ import annotations

import queue
import threading

from k3convert.execution.open_files import DestinationFiles

NUM_BUFFERS = 2


class OutputStream:
    """Reused buffers over one contiguous destination range.

    An operation asks for room, fills it and advances; small neighbours leave in one write. While one buffer is being
    written the next is filled: reading and hashing small tensors then need not wait for the file system.
    """

    def __init__(self, destinations: DestinationFiles, piece_bytes: int) -> None:
        self._destinations = destinations
        self._idle = [memoryview(bytearray(piece_bytes)) for _ in range(NUM_BUFFERS - 1)]
        self._buffer = memoryview(bytearray(piece_bytes))
        self._written: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[tuple[int, memoryview, int, int] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="k3convert-writer", daemon=True)
        self._error: BaseException | None = None
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
            self._hand_over()
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
        """Write what is filled, and wait until everything is written.

        Raises:
            OSError: a write failed.
        """
        self._hand_over()
        while len(self._idle) < NUM_BUFFERS - 1:
            self._idle.append(self._written.get())
        self._raise_error()

    def close(self) -> None:
        """End the writing thread."""
        if self._writer.is_alive():
            self._to_write.put(None)
            self._writer.join()

    def _hand_over(self) -> None:
        """Give the filled buffer to the writer and go on with another."""
        if self._filled and not self.discarding:
            if not self._writer.is_alive():
                self._writer.start()
            self._to_write.put((self._file, self._buffer, self._filled, self._offset))
            self._buffer = self._idle.pop() if self._idle else self._written.get()
            self._raise_error()
        self.written_bytes += self._filled
        self._offset += self._filled
        self._filled = 0

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        while (task := self._to_write.get()) is not None:
            file, buffer, nbytes, offset = task
            try:
                if self._error is None:
                    self._destinations.write_at(file, buffer[:nbytes], offset)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that fills
                self._error = error
            self._written.put(buffer)
