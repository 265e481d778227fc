"""What the first rank says, while it works, in the process that started it."""

from __future__ import annotations

import pickle
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from k3convert.training.events import Event

Address = tuple[str, bytes]
"""A socket's path, and the key that its callers must know."""


class ProgressChannel:
    """Receives events, in a thread of its own, and hands them on.

    Args:
        tell: hears of every event.
        key: what a caller must know.
    """

    def __init__(self, tell: Callable[[Event], None], key: bytes) -> None:
        self._tell, self._key = tell, key
        self._folder = tempfile.TemporaryDirectory(prefix="k3progress-")
        path = str(Path(self._folder.name) / "events")
        self._listener = Listener(path, authkey=key)
        self.address: Address = (path, key)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def __enter__(self) -> ProgressChannel:
        return self

    def __exit__(self, *_: object) -> None:
        """Hear what is still on its way, and close."""
        if self._thread.is_alive():
            with suppress(OSError):  # nobody called: end the wait for a caller
                Client(self.address[0], authkey=self._key).close()
            self._thread.join()
        self._listener.close()
        self._folder.cleanup()

    def _receive(self) -> None:
        with self._listener.accept() as connection:
            while True:
                try:
                    content = connection.recv_bytes()
                except (EOFError, OSError):
                    return
                self._tell(pickle.loads(content))  # noqa: S301 - of our own child, which knows the key


class ProgressSender:
    """The first rank's end of the channel."""

    def __init__(self, address: Address) -> None:
        path, key = address
        self._connection: Connection = Client(path, authkey=key)

    def __call__(self, event: Event) -> None:
        """Send an event."""
        self._connection.send_bytes(pickle.dumps(event))

    def close(self) -> None:
        """Nothing more comes."""
        self._connection.close()
