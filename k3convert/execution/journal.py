"""The journal of a conversion: one line an item, written after the item's bytes are on the device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from k3convert.errors import ResumeRefused
from k3convert.execution.quantization_figures import QuantizationFigures

SUFFIX = ".journal"


class ItemResult(NamedTuple):
    """What is kept of a written item: the digests of its slots, and what quantising did."""

    digests: Mapping[int, str]
    figures: QuantizationFigures | None = None


class Journal:
    """Appends finished items of one part."""

    def __init__(self, folder: Path, part: str) -> None:
        path = folder / (part + SUFFIX)
        _drop_torn_line(path)
        self._file = open(path, "ab")  # noqa: SIM115

    def append(self, finished: Iterable[tuple[int, ItemResult]]) -> None:
        """Record items and their results; returns when they are on the device."""
        for item, (digests, figures) in finished:
            entry = [item, list(digests.items()), None if figures is None else figures.journaled()]
            line = json.dumps(entry, separators=(",", ":"))
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
        self.figures: QuantizationFigures | None = None

    def read_new(self) -> None:
        """Take in what was appended since the last call; a line that is not ended yet waits.

        Raises:
            ResumeRefused: a line is no line of a journal.
        """
        for path in sorted(self._folder.glob("*" + SUFFIX)):
            with open(path, "rb") as file:
                file.seek(self._positions.get(path, 0))
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._positions[path] = self._positions.get(path, 0) + end
            for line in data[:end].splitlines():
                try:
                    item, pairs, figures = json.loads(line)
                    digests = {int(slot): str(value) for slot, value in pairs}
                    result = ItemResult(digests, None if figures is None else QuantizationFigures(*figures))
                    self.add(int(item), result)
                except (TypeError, ValueError) as error:
                    raise ResumeRefused(
                        f"{path} is damaged: {error}", hint="--no-resume starts anew and discards the partial result"
                    ) from error

    def add(self, item: int, result: ItemResult) -> None:
        """Take one item in, once."""
        if item in self.done:
            return
        self.done.add(item)
        self.digests.update(result.digests)
        if result.figures is not None:
            self.figures = result.figures.merged(self.figures)


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that a kill left unfinished."""
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        os.truncate(path, end)
