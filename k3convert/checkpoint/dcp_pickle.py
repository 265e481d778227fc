"""Writes a DCP ``.metadata`` file without torch.

The pickle rebuilds the same dataclasses that ``torch.distributed.checkpoint`` pickles itself; stock ``dcp.load`` reads
it. The bytes depend on the content alone: no clock, path or identifier enters them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from k3convert.checkpoint.dcp_metadata import DcpTensor
from k3convert.checkpoint.dtypes import TORCH_NAMES

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
VERSION = "1.0.0"


class _Writer:
    """Emits protocol-4 opcodes; strings and globals are memoised."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x04")
        self._memo: dict[object, int] = {}

    def _memoised(self, key: object) -> bool:
        """Emit a reference to what was written under ``key``, if anything was."""
        slot = self._memo.get(key)
        if slot is None:
            return False
        self.out += b"h" + bytes((slot,)) if slot < 256 else b"j" + struct.pack("<I", slot)
        return True

    def _memoise(self, key: object) -> None:
        self.out += b"\x94"
        self._memo[key] = len(self._memo)

    def text(self, value: str) -> None:
        if self._memoised(value):
            return
        encoded = value.encode("utf-8")
        if len(encoded) < 256:
            self.out += b"\x8c" + bytes((len(encoded),)) + encoded
        else:
            self.out += b"X" + struct.pack("<I", len(encoded)) + encoded
        self._memoise(value)

    def integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes((value,))
        elif value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            width = value.bit_length() // 8 + 1
            self.out += b"\x8a" + bytes((width,)) + value.to_bytes(width, "little", signed=True)

    def named(self, module: str, name: str) -> None:
        key = (module, name)
        if self._memoised(key):
            return
        self.text(module)
        self.text(name)
        self.out += b"\x93"
        self._memoise(key)

    def instance(self, module: str, name: str) -> None:
        """An object made by ``cls.__new__(cls)``; its state follows."""
        self.named(module, name)
        self.out += b")\x81"

    def size(self, dims: Iterable[int]) -> None:
        dims = tuple(dims)
        key = ("size", dims)
        if self._memoised(key):
            return
        self.named("torch", "Size")
        self.out += b"("
        for dim in dims:
            self.integer(dim)
        self.out += b"t\x85R"
        self._memoise(key)

    def fields(self, module: str, name: str, **states: object) -> None:
        """A dataclass whose fields are texts, integers, None or dims."""
        self.instance(module, name)
        self.out += b"}("
        for field, value in states.items():
            self.text(field)
            if value is None:
                self.out += b"N"
            elif isinstance(value, str):
                self.text(value)
            elif isinstance(value, int):
                self.integer(value)
            else:
                assert isinstance(value, tuple), f"{name}.{field} is a {type(value).__name__}"
                self.size(value)
        self.out += b"ub"

    def properties(self, dtype: str) -> None:
        """``TensorProperties`` of a dense tensor: dtype, strided, no grad, contiguous, not pinned."""
        self.instance(_METADATA, "TensorProperties")
        self.out += b"("
        self.named("torch", TORCH_NAMES[dtype])
        self.named("torch.serialization", "_get_layout")
        self.text("torch.strided")
        self.out += b"\x85R\x89"
        self.named(_METADATA, "_MEM_FORMAT_ENCODING")
        self.out += b"K\x00\x85R\x89tb"


def encode_metadata(tensors: Mapping[str, DcpTensor]) -> bytes:
    """The bytes of ``.metadata`` for these tensors, in the given order."""
    writer = _Writer()
    writer.instance(_METADATA, "Metadata")
    writer.out += b"}("
    writer.text("state_dict_metadata")
    writer.out += b"}("
    for fqn, tensor in tensors.items():
        writer.text(fqn)
        writer.instance(_METADATA, "TensorStorageMetadata")
        writer.out += b"}("
        writer.text("properties")
        writer.properties(tensor.dtype)
        writer.text("size")
        writer.size(tensor.shape)
        writer.text("chunks")
        writer.out += b"]("
        for chunk in tensor.chunks:
            writer.fields(_METADATA, "ChunkStorageMetadata", offsets=chunk.offsets, sizes=chunk.sizes)
        writer.out += b"eub"
    writer.out += b"u"
    writer.text("planner_data")
    writer.out += b"}("
    for fqn in tensors:
        writer.text(fqn)
        writer.text(fqn)
        writer.out += b"\x85"
    writer.out += b"u"
    writer.text("storage_data")
    writer.out += b"}("
    for fqn, tensor in tensors.items():
        for position, chunk in enumerate(tensor.chunks):
            writer.fields(_METADATA, "MetadataIndex", fqn=fqn, index=position, offset=chunk.offsets)
            writer.fields(
                _FILESYSTEM, "_StorageInfo", relative_path=chunk.file, offset=chunk.offset, length=chunk.length
            )
    writer.out += b"u"
    writer.text("storage_meta")
    writer.instance(_METADATA, "StorageMeta")
    writer.out += b"}("
    for field in ("checkpoint_id", "save_id", "load_id"):
        writer.text(field)
        writer.out += b"N"
    writer.text("modules")
    writer.out += b"]ub"
    writer.text("version")
    writer.text(VERSION)
    writer.out += b"ub."
    return bytes(writer.out)
