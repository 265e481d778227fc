"""Stored tensors into torch tensors, a bounded number of bytes at a time."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k3convert.errors import BadInput, UnrepresentableBlocks
from k3convert.execution.gathering import element_dtype, gather_rows
from k3convert.execution.open_files import SourceFiles
from k3convert.numerics.mxfp4_decode import decode, decode_float32
from k3convert.numerics.mxfp4_scales import find_unrepresentable
from k3convert.planning.logical_tensors import LogicalCheckpoint, LogicalTensor

CHUNK_BYTES = 64 << 20
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class TensorReader:
    """Reads a checkpoint's tensors by name; holds one chunk at a time.

    Args:
        checkpoint: where the tensors lie.
        chunk_bytes: the most that is held at once, in bytes of float32 values; a single row may be larger.
    """

    def __init__(self, checkpoint: LogicalCheckpoint, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._tensors = checkpoint.tensors
        self._sources = SourceFiles(checkpoint.files)
        self._chunk_bytes = chunk_bytes

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill ``out``, of any dtype and device, with a tensor.

        ``A_log`` may be stored with zeros behind its heads, and a convolution with or without its middle dim; any
        other tensor has the shape of ``out``.

        Raises:
            BadInput: the file ends too early or cannot be read, the padding is not zero, or the shape is another.
            UnrepresentableBlocks: packed values have no finite form in the dtype of ``out``.
        """
        tensor = self._tensors[name]
        stored_shape = tensor.shape
        if name.endswith(".A_log") and stored_shape != tuple(out.shape):
            self._read_unpadded(name, tensor, out)
            return
        if prod(stored_shape) != out.numel():
            raise BadInput(f"{name}: stored {list(stored_shape)}, the network has {list(out.shape)}")
        self._copy_rows(name, 0, out.view(stored_shape))

    def num_rows(self, name: str) -> int:
        """The stored length of a tensor along its first dim."""
        return self._tensors[name].shape[0]

    def read_rows_into(self, name: str, first: int, out: Tensor) -> None:
        """Fill ``out`` with as many consecutive rows of a tensor, from ``first`` on; the other dims are all there.

        Raises:
            BadInput, UnrepresentableBlocks: as ``read_into``.
        """
        stored_shape = self._tensors[name].shape
        if first + out.shape[0] > stored_shape[0] or prod(stored_shape[1:]) != prod(out.shape[1:]):
            raise BadInput(f"{name}: stored {list(stored_shape)}, wanted {list(out.shape)} from row {first} on")
        self._copy_rows(name, first, out.view(out.shape[0], *stored_shape[1:]))

    def close(self) -> None:
        """Close the files."""
        self._sources.close()

    def _copy_rows(self, name: str, first: int, target: Tensor) -> None:
        tensor, num_rows = self._tensors[name], target.shape[0]
        step = max(1, self._chunk_bytes // max(4, 4 * prod(tensor.shape[1:])))
        for start in range(0, num_rows, step):
            count = min(step, num_rows - start)
            target[start : start + count].copy_(self._rows(name, tensor, first + start, count, target.dtype))

    def _read_unpadded(self, name: str, tensor: LogicalTensor, out: Tensor) -> None:
        stored = self._rows(name, tensor, 0, tensor.shape[0], out.dtype)
        num_heads = out.numel()
        tail = stored[num_heads:]
        # A NaN is not zero either.
        if num_wrong := int((tail != 0).sum()):
            raise BadInput(
                f"{name}: {num_wrong} of the {tail.numel()} entries behind its {num_heads} heads are not zero"
            )
        out.copy_(stored[:num_heads])

    def _rows(self, name: str, tensor: LogicalTensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
        if tensor.scale is not None:
            return self._decoded_rows(name, tensor, first, count, dtype)
        stored_dtype = tensor.values.stored_dtype
        bits = np.empty((count, *tensor.shape[1:]), element_dtype(stored_dtype))
        gather_rows(self._sources, tensor.values, first, count, bits)
        return torch.from_numpy(bits).view(_TORCH_DTYPES[stored_dtype])

    def _decoded_rows(self, name: str, tensor: LogicalTensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
        if tensor.scale is None:
            raise ValueError(f"{name} is not packed")
        columns = tensor.shape[1]
        packed = np.empty((count, columns // 2), np.uint8)
        scale = np.empty((count, columns // 32), np.uint8)
        gather_rows(self._sources, tensor.values, first, count, packed)
        gather_rows(self._sources, tensor.scale, first, count, scale)
        self._refuse_unrepresentable(name, first, packed, scale)
        if dtype == torch.bfloat16:
            bits: NDArray[np.uint16] = np.empty((count, columns), np.uint16)
            decode(packed, scale, bits)
            return torch.from_numpy(bits).view(torch.bfloat16)
        values: NDArray[np.float32] = np.empty((count, columns), np.float32)
        decode_float32(packed, scale, values)
        return torch.from_numpy(values)

    @staticmethod
    def _refuse_unrepresentable(name: str, first: int, packed: NDArray[Any], scale: NDArray[Any]) -> None:
        found = find_unrepresentable(packed, scale)
        if len(found):
            raise UnrepresentableBlocks(
                f"{name}: {len(found)} blocks have no finite value",
                offenders=[f"row {first + row}, block {block}, scale byte {byte}" for row, block, byte in found],
            )
