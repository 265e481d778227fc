"""A DCP ``.metadata`` file, read through an allow-list and written without torch.

``.metadata`` is a pickle. Stock readers run whatever it names; here only the record types that a metadata file needs
can be named, and each stands for a plain record of ours.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from k3convert.checkpoint.dtypes import CODES
from k3convert.checkpoint.member_paths import unsafe_reason
from k3convert.checkpoint.regular_files import open_regular, why_unreadable
from k3convert.errors import BadMetadata, IncompleteCheckpoint, PathEscape

METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 4 << 30
KNOWN_VERSIONS = (None, "1.0.0")


class DcpChunk(NamedTuple):
    """One stored box of a tensor, and the entry that holds it: ``length`` bytes at ``offset`` of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


class DcpTensor(NamedTuple):
    """One tensor: dtype code, global shape and the boxes that cover it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """Everything a ``.metadata`` file says about a checkpoint."""

    tensors: Mapping[str, DcpTensor]
    other_entries: tuple[str, ...]
    version: str | None

    def file_names(self) -> list[str]:
        """The ``.distcp`` files that hold tensors, sorted."""
        return sorted({chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks})


class _Record:
    """Stands for any metadata dataclass: attributes come from the pickled state."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"{type(self).__name__} with a state of {type(state).__name__}")
        self.__dict__.update(state)


class _Metadata(_Record): ...


class _Tensor(_Record): ...


class _Bytes(_Record): ...


class _Chunk(_Record): ...


class _StorageMeta(_Record): ...


class _StorageInfo(_Record): ...


class _Properties:
    dtype: Any = None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state["dtype"] if isinstance(state, dict) else state[0]


class _Index(_Record):
    fqn: Any = None
    offset: Any = None

    def __hash__(self) -> int:
        # an index is a dictionary key before its state is set when a pickle refers to itself; refuse that
        if not isinstance(self.fqn, str):
            raise pickle.UnpicklingError("a MetadataIndex without a name")
        return hash((self.fqn, self.offset))

    def is_whole(self) -> bool:
        """Whether name and offset are what they should be; a state may come after the hash was taken."""
        return isinstance(self.fqn, str) and (self.offset is None or _is_dims(self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


class _Dtype(str):
    """The safetensors code of a torch dtype; its own type, so that a plain string cannot pose as one."""

    __slots__ = ()


class FixedCall:
    """Stands for a function that a pickle may call and, unlike a function, cannot change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self._function(*arguments)

    def __setstate__(self, _state: Any) -> None:
        raise pickle.UnpicklingError("it gives a function a state; nothing was run")


@FixedCall
def _as_tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


@FixedCall
def _ignored(*_: Any) -> None:
    return None


@FixedCall
def _joined_path(*parts: Any) -> str:
    return "/".join(str(part) for part in parts)


_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    (_CHECKPOINT, "Metadata"): _Metadata,
    (_CHECKPOINT, "TensorStorageMetadata"): _Tensor,
    (_CHECKPOINT, "BytesStorageMetadata"): _Bytes,
    (_CHECKPOINT, "ChunkStorageMetadata"): _Chunk,
    (_CHECKPOINT, "TensorProperties"): _Properties,
    (_CHECKPOINT, "MetadataIndex"): _Index,
    (_CHECKPOINT, "StorageMeta"): _StorageMeta,
    (_CHECKPOINT, "_MEM_FORMAT_ENCODING"): _ignored,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): _as_tuple,
    ("torch.serialization", "_get_layout"): _ignored,
    ("pathlib", "PosixPath"): _joined_path,
    ("pathlib._local", "PosixPath"): _joined_path,
    ("pathlib", "PurePosixPath"): _joined_path,
    ("collections", "OrderedDict"): OrderedDict,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name in CODES:
            return _Dtype(CODES[name])
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no DCP metadata needs; nothing was run")


def read_metadata(folder: Path) -> DcpMetadata:
    """Read and check ``folder/.metadata``.

    Raises:
        BadMetadata: missing, truncated, hostile, of an unknown version, or inconsistent; every offender is listed.
        PathEscape: an entry's file lies outside the folder.
    """
    path = folder / METADATA_NAME
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_METADATA_BYTES:
                raise BadMetadata(f"{path}: {size} bytes, at most {MAX_METADATA_BYTES} are read")
            document = _MetadataUnpickler(file).load()
    except OSError as error:
        raise BadMetadata(
            f"{path} {why_unreadable(path, error)}", hint="a DCP folder without .metadata is not a finished checkpoint"
        ) from error
    except (pickle.UnpicklingError, EOFError) as error:
        raise BadMetadata(f"{path}: {error or 'the pickle is cut short'} ({size} bytes)") from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise BadMetadata(f"{path}: not a DCP metadata file: {error!r} ({size} bytes)") from error
    if not isinstance(document, _Metadata):
        raise BadMetadata(f"{path}: holds a {type(document).__name__}, not DCP metadata")
    return _checked(path, document)


def _checked(path: Path, document: _Metadata) -> DcpMetadata:
    entries, storage = getattr(document, "state_dict_metadata", None), getattr(document, "storage_data", None)
    version = getattr(document, "version", None)
    if version not in KNOWN_VERSIONS:
        raise BadMetadata(f"{path}: metadata version {version!r}; known: {', '.join(map(str, KNOWN_VERSIONS))}")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise BadMetadata(f"{path}: no state_dict_metadata or no storage_data")
    infos: dict[tuple[str, tuple[int, ...] | None], _StorageInfo] = {}
    for index, info in storage.items():
        if not isinstance(index, _Index) or not isinstance(info, _StorageInfo) or not index.is_whole():
            raise BadMetadata(f"{path}: storage_data maps {type(index).__name__}, not entries to places in files")
        infos[index.fqn, index.offset] = info
    offenders: list[str] = []
    escapes: set[str] = set()
    tensors: dict[str, DcpTensor] = {}
    others: list[str] = []
    for fqn, entry in entries.items():
        if isinstance(entry, _Bytes):
            others.append(str(fqn))
            continue
        tensor = _tensor(fqn, entry, infos, escapes) if isinstance(entry, _Tensor) else f"{fqn}: not a tensor"
        if isinstance(tensor, str):
            offenders.append(tensor)
        else:
            tensors[fqn] = tensor
    if escapes:
        raise PathEscape(f"{path}: {len(escapes)} file names leave the folder", offenders=sorted(escapes))
    if offenders:
        raise BadMetadata(f"{path}: {len(offenders)} of {len(entries)} entries are inconsistent", offenders=offenders)
    return DcpMetadata(tensors, tuple(others), version)


def _tensor(
    fqn: Any, entry: _Tensor, infos: Mapping[tuple[str, tuple[int, ...] | None], _StorageInfo], escapes: set[str]
) -> DcpTensor | str:
    """One tensor's record, or what is wrong with it."""
    shape: Any = getattr(entry, "size", None)
    dtype: Any = getattr(getattr(entry, "properties", None), "dtype", None)
    chunks: Any = getattr(entry, "chunks", None)
    if not isinstance(fqn, str) or not _is_dims(shape) or not isinstance(dtype, _Dtype) or not isinstance(chunks, list):
        return f"{fqn}: no name, size, dtype or chunks"
    out: list[DcpChunk] = []
    for chunk in chunks:
        offsets: Any = getattr(chunk, "offsets", None)
        sizes: Any = getattr(chunk, "sizes", None)
        if not _is_dims(offsets) or not _is_dims(sizes) or not len(offsets) == len(sizes) == len(shape):
            return f"{fqn}: a chunk at {offsets} of {sizes} in a tensor of {list(shape)}"
        if any(begin + size > dim for begin, size, dim in zip(offsets, sizes, shape, strict=True)):
            return f"{fqn}: the chunk at {list(offsets)} of {list(sizes)} leaves the tensor of {list(shape)}"
        info = infos.get((fqn, offsets))
        if info is None:
            return f"{fqn}: no file holds its chunk at {list(offsets)}"
        place = _place(info, escapes)
        if isinstance(place, str):
            return f"{fqn}: {place}"
        out.append(DcpChunk(offsets, sizes, *place))
    if fault := _cover_fault(shape, out):
        return f"{fqn}: {fault}"
    return DcpTensor(str(dtype), shape, tuple(out))


def _is_dims(value: object) -> bool:
    return isinstance(value, tuple) and all(type(dim) is int and dim >= 0 for dim in value)


def _place(info: _StorageInfo, escapes: set[str]) -> tuple[str, int, int] | str:
    file, offset, length = (getattr(info, field, None) for field in ("relative_path", "offset", "length"))
    if reason := unsafe_reason(file):
        escapes.add(f"{file!r} {reason}")
        return f"file {file!r} {reason}"
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        return f"offset {offset!r} or length {length!r} is no byte count"
    if transforms := getattr(info, "transform_descriptors", None):
        return f"stored through {transforms!r}, which is not supported"
    assert isinstance(file, str)
    return file, offset, length


def _cover_fault(shape: tuple[int, ...], chunks: list[DcpChunk]) -> str | None:
    """Why the boxes do not cover the tensor exactly once, or None."""
    stored = sum(prod(chunk.sizes) for chunk in chunks)
    if stored != prod(shape):
        return f"its {len(chunks)} chunks hold {stored} of {prod(shape)} elements"
    boxes = sorted((chunk.offsets, chunk.sizes) for chunk in chunks if prod(chunk.sizes))
    for position, (offsets, sizes) in enumerate(boxes):
        for other_offsets, other_sizes in boxes[position + 1 :]:
            if offsets and other_offsets[0] >= offsets[0] + sizes[0]:
                break
            if all(
                a < b + other and b < a + size
                for a, size, b, other in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
            ):
                return f"the chunks at {list(offsets)} and {list(other_offsets)} overlap"
    return None


def check_files(folder: Path, metadata: DcpMetadata) -> None:
    """Check that every ``.distcp`` file is there and long enough for its entries.

    Raises:
        IncompleteCheckpoint: files that are missing or cut short, all of them.
    """
    ends: dict[str, int] = {}
    for tensor in metadata.tensors.values():
        for chunk in tensor.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    offenders = []
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file():
            offenders.append(f"{name} is missing")
        elif path.stat().st_size < end:
            offenders.append(f"{name} has {path.stat().st_size} bytes, its entries end at {end}")
    if offenders:
        raise IncompleteCheckpoint(
            f"{folder}: {len(offenders)} of {len(ends)} .distcp files are missing or cut short", offenders=offenders
        )
