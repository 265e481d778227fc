"""The journal of a conversion: one line an item, written after the item's bytes are on the device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

SUFFIX = ".journal"


class Journal:
    """Appends finished items of one part."""

    def __init__(self, folder: Path, part: str) -> None:
        path = folder / (part + SUFFIX)
        _drop_torn_line(path)
        self._file = open(path, "ab")  # noqa: SIM115

    def append(self, finished: Iterable[tuple[int, Mapping[int, str]]]) -> None:
        """Record items and the digests of their slots; returns when they are on the device."""
        for item, digests in finished:
            line = json.dumps([item, list(digests.items())], separators=(",", ":"))
            self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JournalReader:
    """Reads all journals of a folder, again and again, each line once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions: dict[Path, int] = {}
        self.done: set[int] = set()
        self.digests: dict[int, str] = {}

    def read_new(self) -> None:
        """Take in what was appended since the last call; a line that is not ended yet waits."""
        for path in sorted(self._folder.glob("*" + SUFFIX)):
            with open(path, "rb") as file:
                file.seek(self._positions.get(path, 0))
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._positions[path] = self._positions.get(path, 0) + end
            for line in data[:end].splitlines():
                item, pairs = json.loads(line)
                self.add(item, {int(slot): value for slot, value in pairs})

    def add(self, item: int, digests: Mapping[int, str]) -> None:
        """Take one item in."""
        self.done.add(item)
        self.digests.update(digests)


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that a kill left unfinished."""
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        os.truncate(path, end)
