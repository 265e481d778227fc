"""Files of one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3convert.checkpoint.json_text import parse_json
from k3convert.errors import BadInput, UsageError


class BadRecords(BadInput):
    """Lines of a data file are no records of its kind; all of them are listed."""

    code = "bad-records"


def read_objects(path: Path, limit: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every object with its line's number, from 1; empty lines are passed over.

    Raises:
        UsageError: there is no such file.
        BadRecords: a line is no JSON object.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    num_read = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if limit is not None and num_read >= limit:
                return
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError as error:
                raise BadRecords(f"{path} line {number} is no JSON: {error}") from error
            if not isinstance(record, dict):
                raise BadRecords(f"{path} line {number} is a JSON {type(record).__name__}, no object")
            num_read += 1
            yield number, record


def refuse(path: Path, faults: list[str], num_records: int) -> None:
    """Raise where records are wrong, or where there are none.

    Raises:
        BadRecords: with every fault.
    """
    if faults:
        raise BadRecords(f"{path}: {len(faults)} of {num_records} records are wrong", offenders=faults)
    if not num_records:
        raise BadRecords(f"{path} holds no record")
