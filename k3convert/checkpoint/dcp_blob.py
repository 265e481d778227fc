"""The framing of one tensor inside a ``.distcp`` file: a stored zip as ``torch.save`` writes it.

A DCP entry is a zip archive with stored members. For a given dtype and shape everything but the payload is constant,
so an entry is ``prefix + payload + suffix`` and nothing has to pass through torch. The CRC fields stay 0: torch's
reader does not check them, and digests of the payload are kept in the manifest.

Entries written by others are located by reading the archive's directory and its ``data.pkl`` through an allow-list
that builds no tensor and runs no code.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from k3convert.checkpoint.dcp_metadata import FixedCall
from k3convert.checkpoint.dtypes import CODES, STORAGE_CLASSES, TORCH_NAMES, num_bytes

ALIGNMENT = 64
MAX_PAYLOAD_BYTES = 2**32 - 2**20
MAX_PICKLE_BYTES = 1 << 20
UTF8_NAMES = 0x0800
ReadAt = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class BlobFrame:
    """Bytes before and after the payload of one entry."""

    prefix: bytes
    suffix: bytes


@lru_cache(maxsize=4096)
def blob_frame(dtype: str, shape: tuple[int, ...]) -> BlobFrame:
    """The constant bytes around the payload of a contiguous tensor.

    Raises:
        ValueError: the payload is larger than an entry may be (4 GiB less 1 MiB).
    """
    nbytes = num_bytes(dtype, shape)
    if nbytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a {dtype} {list(shape)} entry of {nbytes} bytes; at most {MAX_PAYLOAD_BYTES} fit")
    members: list[tuple[bytes, int, int]] = []
    prefix = bytearray()

    def add(name: str, content: bytes | None, size: int) -> None:
        encoded = f"archive/{name}".encode()
        padding = -(len(prefix) + 30 + len(encoded) + 4) % ALIGNMENT
        extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        members.append((encoded, len(prefix), size))
        prefix.extend(
            struct.pack("<4s5H3I2H", b"PK\3\4", 0, UTF8_NAMES, 0, 0, 0, 0, size, size, len(encoded), len(extra))
        )
        prefix.extend(encoded + extra)
        if content is not None:
            prefix.extend(content)

    for name, content in (
        ("data.pkl", _tensor_pickle(dtype, shape)),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        add(name, content, len(content))
    add("data/0", None, nbytes)
    directory = b"".join(
        struct.pack("<4s6H3I5H2I", b"PK\1\2", 0, 0, UTF8_NAMES, 0, 0, 0, 0, size, size, len(name), 0, 0, 0, 0, 0, start)
        + name
        for name, start, size in members
    )
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(members), len(members), len(directory), len(prefix) + nbytes, 0)
    return BlobFrame(bytes(prefix), directory + end)


def locate_payload(read_at: ReadAt, length: int, dtype: str, shape: tuple[int, ...]) -> int:
    """Offset of the payload inside an entry of ``length`` bytes that holds this tensor.

    Raises:
        ValueError: the entry is damaged, or holds another tensor, or one that is not contiguous.
    """
    nbytes = num_bytes(dtype, shape)
    if nbytes <= MAX_PAYLOAD_BYTES:
        frame = blob_frame(dtype, shape)
        own = len(frame.prefix) + nbytes + len(frame.suffix) == length
        if own and read_at(0, len(frame.prefix)) == frame.prefix:
            return len(frame.prefix)
    return _locate_in_archive(read_at, length, dtype, shape)


def _tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """``data.pkl``: a protocol-2 pickle that rebuilds one contiguous tensor over storage ``0``."""
    stride = [prod(max(dim, 1) for dim in shape[axis + 1 :]) for axis in range(len(shape))]
    storage = STORAGE_CLASSES.get(dtype)
    if storage is not None:
        rebuild, storage_global, tail, count = "_rebuild_tensor_v2", f"torch\n{storage}", b"", prod(shape)
    else:
        rebuild, storage_global, count = "_rebuild_tensor_v3", "torch.storage\nUntypedStorage", num_bytes(dtype, shape)
        tail = f"ctorch\n{TORCH_NAMES[dtype]}\n".encode()
    return b"".join(
        (
            b"\x80\x02",
            f"ctorch._utils\n{rebuild}\n".encode(),
            b"((",
            _text("storage"),
            f"c{storage_global}\n".encode(),
            _text("0"),
            _text("cpu"),
            _int(count),
            b"tQ",
            _int(0),
            b"(",
            *(_int(dim) for dim in shape),
            b"t(",
            *(_int(step) for step in stride),
            b"t\x89ccollections\nOrderedDict\n)R",
            tail,
            b"tR.",
        )
    )


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def _int(value: int) -> bytes:
    if value < 256:
        return b"K" + bytes((value,))
    if value < 2**31:
        return b"J" + value.to_bytes(4, "little")
    width = value.bit_length() // 8 + 1
    return b"\x8a" + bytes((width,)) + value.to_bytes(width, "little")


class _SliceFile(io.RawIOBase):
    """A seekable read-only file over one entry of a larger file."""

    def __init__(self, read_at: ReadAt, length: int) -> None:
        self._read_at, self._length, self._position = read_at, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        size = left if size < 0 else min(size, left)
        data = self._read_at(self._position, size)
        self._position += len(data)
        return data


class _Rebuilt(NamedTuple):
    dtype: str
    member: str
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _TensorUnpickler(pickle.Unpickler):
    """Reads ``data.pkl`` into a ``_Rebuilt`` record; nothing outside the table can be named."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_v2
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _rebuild_v3
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return "UntypedStorage"
        if module == "torch" and name in CODES:
            return CODES[name]
        for code, storage in STORAGE_CLASSES.items():
            if (module, name) == ("torch", storage):
                return code
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a tensor entry")

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        kind, storage, key, _location, _count = pid
        if kind != "storage" or not isinstance(storage, str) or not isinstance(key, str):
            raise pickle.UnpicklingError("a persistent id that is no storage")
        return storage, key


@FixedCall
def _rebuild_v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Rebuilt:
    return _Rebuilt(storage[0], storage[1], int(offset), tuple(shape), tuple(stride))


@FixedCall
def _rebuild_v3(storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any) -> _Rebuilt:
    return _Rebuilt(dtype, storage[1], int(offset), tuple(shape), tuple(stride))


def _locate_in_archive(read_at: ReadAt, length: int, dtype: str, shape: tuple[int, ...]) -> int:
    try:
        with zipfile.ZipFile(_SliceFile(read_at, length)) as archive:
            members = {info.filename: info for info in archive.infolist()}
        return _find_payload(read_at, members, length, dtype, shape)
    except (zipfile.BadZipFile, NotImplementedError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"is no entry of torch.save: {error}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError, struct.error) as error:
        raise ValueError(f"is damaged: {error!r}") from error


def _find_payload(
    read_at: ReadAt, members: Mapping[str, zipfile.ZipInfo], length: int, dtype: str, shape: tuple[int, ...]
) -> int:
    """Read ``data.pkl``, compare it with the tensor that is wanted, and find its storage."""
    pickles = [info for name, info in members.items() if name.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
        raise ValueError("has no data.pkl of a tensor")
    root = pickles[0].filename.removesuffix("data.pkl")
    start = _member_start(read_at, pickles[0])
    record = _TensorUnpickler(io.BytesIO(read_at(start, pickles[0].file_size))).load()
    if not isinstance(record, _Rebuilt):
        raise ValueError(f"holds a {type(record).__name__}, not a tensor")
    if (record.dtype, record.shape) != (dtype, shape):
        raise ValueError(f"holds {record.dtype} {list(record.shape)}, the metadata says {dtype} {list(shape)}")
    contiguous = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    steps = [(have, want) for dim, have, want in zip(shape, record.stride, contiguous, strict=True) if dim > 1]
    if prod(shape) and any(have != want for have, want in steps):
        raise ValueError(f"is not contiguous: stride {list(record.stride)} for shape {list(shape)}")
    member = members.get(f"{root}data/{record.member}")
    if member is None or member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"storage {record.member!r} is missing or compressed")
    first = record.storage_offset * num_bytes(dtype, (1,))
    if first < 0:
        raise ValueError(f"begins before its storage, at element {record.storage_offset}")
    if first + num_bytes(dtype, shape) > member.file_size:
        raise ValueError(f"storage {record.member!r} has {member.file_size} bytes, the tensor needs more")
    payload = _member_start(read_at, member) + first
    if payload + num_bytes(dtype, shape) > length:
        raise ValueError("is cut short")
    return payload


def _member_start(read_at: ReadAt, member: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin. They are not read through ``zipfile``: torch may leave the CRC at 0."""
    if member.header_offset < 0:
        raise ValueError(f"names a member at byte {member.header_offset}")
    name_length, extra_length = struct.unpack("<2H", read_at(member.header_offset + 26, 4))
    return member.header_offset + 30 + int(name_length) + int(extra_length)
