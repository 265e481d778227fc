"""Headers of safetensors files: read with every check of the format, and written.

Format: 8 bytes little-endian length N, N bytes of JSON beginning with ``{``, then the data. Offsets in the header are
relative to the data. This module trusts nothing: the length is checked against the file's size before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from k3convert.checkpoint.dtypes import BITS, num_bytes
from k3convert.checkpoint.json_text import DuplicateKey, parse_json
from k3convert.checkpoint.regular_files import open_regular, why_unreadable
from k3convert.errors import BadShard, IncompleteCheckpoint

MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
MAX_DIM = 2**63 - 1
TORCH_FORMAT: Mapping[str, str] = {"format": "pt"}


class TensorEntry(NamedTuple):
    """One tensor of a file: where its bytes lie, counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One safetensors file: its entries in the order of their bytes, and the header's own bytes."""

    path: Path
    raw: bytes
    metadata: Mapping[str, str] | None
    entries: tuple[TensorEntry, ...]
    file_bytes: int


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of one safetensors file.

    Raises:
        IncompleteCheckpoint: the file is missing, or a dangling link of an interrupted download.
        BadShard: the file breaks the format; every offending tensor is listed.
    """
    try:
        with open_regular(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            head = file.read(LENGTH_BYTES)
            length = _header_length(path, head, file_bytes)
            text = file.read(length)
    except FileNotFoundError as error:
        raise IncompleteCheckpoint(f"{path} {why_unreadable(path, error)}", hint="fetch it again") from error
    except OSError as error:
        raise BadShard(f"{path} {why_unreadable(path, error)}") from error
    if len(text) != length:
        raise BadShard(f"{path}: the header has {len(text)} of {length} bytes")
    return parse_header(path, head + text, file_bytes)


def parse_header(path: Path, raw: bytes, file_bytes: int | None) -> ShardHeader:
    """Check a header's bytes (length prefix included) against the size of its file, in bytes.

    Without a size the file is taken to end where the last tensor does.

    Raises:
        BadShard: the header breaks the format; every offending tensor is listed.
    """
    try:
        document = parse_json(raw[LENGTH_BYTES:])
    except DuplicateKey as error:
        raise BadShard(f"{path}: the header has a {error}") from error
    except ValueError as error:
        raise BadShard(f"{path}: the header is not JSON: {error}") from error
    if raw[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{" or not isinstance(document, dict):
        raise BadShard(f"{path}: the header does not begin with {{")
    metadata = document.pop("__metadata__", None)
    _check_metadata(path, metadata)
    offenders: list[str] = []
    entries: list[TensorEntry] = []
    data_start = len(raw)
    for name, fields in document.items():
        entry = _entry(name, fields, data_start)
        if isinstance(entry, str):
            offenders.append(entry)
        else:
            entries.append(entry)
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    if file_bytes is None:
        file_bytes = max((entry.offset + entry.nbytes for entry in entries), default=data_start)
    if not offenders:
        offenders = _coverage_faults(entries, data_start, file_bytes)
    if offenders:
        raise BadShard(f"{path}: {len(offenders)} faults in the header of {len(document)} tensors", offenders=offenders)
    return ShardHeader(path, raw, metadata, tuple(entries), file_bytes)


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, metadata: Mapping[str, str] | None = TORCH_FORMAT
) -> tuple[bytes, list[TensorEntry]]:
    """Lay tensors ``(name, dtype, shape)`` out back to back; the header's bytes and the entries, in the given order.

    ``metadata`` None leaves ``__metadata__`` out, as the released shards do.
    """
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    relative: list[TensorEntry] = []
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + num_bytes(dtype, shape)
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        relative.append(TensorEntry(name, dtype, shape, begin, end - begin))
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return raw, [entry._replace(offset=entry.offset + len(raw)) for entry in relative]


def _header_length(path: Path, head: bytes, file_bytes: int) -> int:
    if file_bytes == 0:
        raise BadShard(f"{path}: the file is empty (0 bytes)", hint="fetch it again")
    if len(head) < LENGTH_BYTES:
        raise BadShard(f"{path}: {file_bytes} bytes, too short for a safetensors file")
    length = int.from_bytes(head, "little")
    if LENGTH_BYTES + length <= file_bytes and length <= MAX_HEADER_BYTES:
        return length
    # text read as a length is astronomically large: say what the file is instead
    if head.startswith(b"version "):
        raise BadShard(f"{path}: a Git LFS pointer, not the file it points to", hint="run git lfs pull")
    if head.lstrip()[:1] == b"<":
        raise BadShard(f"{path}: an HTML or XML page, not a safetensors file", hint="fetch it again")
    if length > MAX_HEADER_BYTES:
        raise BadShard(f"{path}: the header claims {length} bytes, the format allows {MAX_HEADER_BYTES}")
    raise BadShard(f"{path}: the header claims {length} bytes, the file has {file_bytes - LENGTH_BYTES} after it")


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadShard(f"{path}: __metadata__ is not an object of strings")
    if metadata.get("format", "pt") != "pt":
        raise BadShard(f"{path}: the file's format is {metadata['format']!r}; only 'pt' is read")


def _entry(name: str, fields: object, data_start: int) -> TensorEntry | str:
    """One entry, or what is wrong with it."""
    if not isinstance(fields, dict):
        return f"{name}: not an object"
    if not _is_text(name):
        return f"{name!r}: the name is not UTF-8 text"
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"{name}: unknown dtype {dtype!r}"
    if not isinstance(shape, list) or not _are_dims(shape):
        return f"{name}: shape {shape!r} is not a list of non-negative integers"
    if not isinstance(offsets, list) or len(offsets) != 2:
        return f"{name}: data_offsets {offsets!r} is not a pair of integers"
    begin, end = offsets
    if type(begin) is not int or type(end) is not int:
        return f"{name}: data_offsets {offsets!r} is not a pair of integers"
    if begin < 0 or end < begin:
        return f"{name}: data_offsets {offsets} are negative or reversed"
    try:
        wanted = num_bytes(dtype, tuple(shape))
    except ValueError as error:
        return f"{name}: {error}"
    if wanted != end - begin:
        return f"{name}: {dtype} {shape} needs {wanted} bytes, data_offsets {offsets} hold {end - begin}"
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, wanted)


def _is_text(name: str) -> bool:
    """Whether a name has no lone surrogate, which JSON can spell and no file can hold."""
    return name.isascii() or not any(0xD800 <= ord(character) < 0xE000 for character in name)


def _are_dims(shape: list[object]) -> bool:
    for dim in shape:  # noqa: SIM110 - a generator costs seconds over half a million tensors
        if type(dim) is not int or dim < 0 or dim > MAX_DIM:
            return False
    return True


def _coverage_faults(entries: list[TensorEntry], data_start: int, file_bytes: int) -> list[str]:
    """Holes, overlaps, trailing or missing bytes: the entries must cover the data exactly once."""
    faults: list[str] = []
    end, previous = data_start, "the header"
    for entry in entries:
        if entry.offset < end:
            faults.append(f"{entry.name}: overlaps {previous} by {end - entry.offset} bytes")
        elif entry.offset > end:
            faults.append(f"{entry.name}: a hole of {entry.offset - end} bytes lies before it, after {previous}")
        if entry.offset + entry.nbytes >= end:
            end, previous = entry.offset + entry.nbytes, entry.name
    if end > file_bytes:
        cut = sum(entry.offset + entry.nbytes > file_bytes for entry in entries)
        faults.append(f"{previous}: ends at byte {end}, the file at {file_bytes}: truncated, {cut} tensors cut")
    elif end < file_bytes:
        faults.append(f"{file_bytes - end} bytes after the last tensor {previous} belong to none")
    return faults
