"""``diff``: the values of two checkpoints, whatever their form: packed or plain, HF or DCP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from k3convert.execution.encoding import cast_bits
from k3convert.execution.events import Advanced, EventSink, Started, ignore_event
from k3convert.execution.gathering import Array, element_dtype, gather_rows
from k3convert.execution.open_files import SourceFiles
from k3convert.numerics.difference import Difference, compare
from k3convert.numerics.mxfp4_decode import decode, decode_float32
from k3convert.planning.logical_tensors import LogicalCheckpoint, LogicalTensor, open_logical

PIECE_VALUES = 1 << 20
MAX_WORKERS = 8


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How one tensor of the two checkpoints differs."""

    name: str
    kind: str
    detail: str
    num_different: int = 0
    num_values: int = 0
    max_ulp: int = 0
    max_abs: float = 0.0

    def document(self) -> dict[str, Any]:
        """The difference as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """The comparison of two checkpoints, the worst tensors first."""

    first: str
    second: str
    num_compared: int
    num_bitwise_equal: int
    differences: tuple[TensorDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether every value of every tensor is bitwise the same."""
        return not self.differences

    def document(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {
            "equal": self.equal,
            "first": self.first,
            "second": self.second,
            "tensors_compared": self.num_compared,
            "tensors_bitwise_equal": self.num_bitwise_equal,
            "differences": [difference.document() for difference in self.differences],
        }


def diff_checkpoints(
    first: Path, second: Path, *, workers: int | None = None, on_event: EventSink = ignore_event
) -> ValueDiff:
    """Compare all tensors of two checkpoints by value; packed experts count as the values they decode to.

    Raises:
        BadInput: a side is no readable checkpoint.
    """
    a, b = open_logical(first), open_logical(second)
    found = [
        *(TensorDifference(name, "missing", f"only in {first}") for name in a.tensors if name not in b.tensors),
        *(TensorDifference(name, "extra", f"only in {second}") for name in b.tensors if name not in a.tensors),
    ]
    common = [name for name in a.tensors if name in b.tensors]
    num_equal = 0
    readers = _Reader(a), _Reader(b)
    with ThreadPoolExecutor(workers or max(1, min(MAX_WORKERS, os.cpu_count() or 1))) as pool:
        done = 0
        on_event(Started("diff", sum(a.tensors[name].values.nbytes for name in common), 0))
        for name, (differences, equal) in zip(
            common, pool.map(lambda name: _compare(name, *readers), common), strict=True
        ):
            found += differences
            num_equal += equal
            done += a.tensors[name].values.nbytes
            on_event(Advanced(done))
    order = {"missing": 0, "extra": 1, "shape": 2, "dtype": 3, "values": 4}
    found.sort(key=lambda item: (order[item.kind], -item.max_abs, item.name))
    return ValueDiff(str(first), str(second), len(common), num_equal, tuple(found))


class _Reader:
    def __init__(self, checkpoint: LogicalCheckpoint) -> None:
        self.tensors: Mapping[str, LogicalTensor] = checkpoint.tensors
        self.sources = SourceFiles(checkpoint.files)

    def rows(self, tensor: LogicalTensor, first: int, count: int, dtype: str) -> Array:
        """Rows of a tensor as bf16 patterns or float32, whatever its form."""
        if tensor.scale is None:
            bits = np.empty((count, *tensor.values.shape[1:]), element_dtype(tensor.values.stored_dtype))
            gather_rows(self.sources, tensor.values, first, count, bits)
            out = cast_bits(bits, tensor.values.stored_dtype, dtype)
            return out.view(np.float32) if dtype == "F32" else out
        packed = np.empty((count, tensor.shape[1] // 2), np.uint8)
        scale = np.empty((count, tensor.shape[1] // 32), np.uint8)
        gather_rows(self.sources, tensor.values, first, count, packed)
        gather_rows(self.sources, tensor.scale, first, count, scale)
        decoded = np.empty((count, tensor.shape[1]), np.uint16 if dtype == "BF16" else np.float32)
        (decode if dtype == "BF16" else decode_float32)(packed, scale, decoded)
        return decoded


def _compare(name: str, left: _Reader, right: _Reader) -> tuple[list[TensorDifference], int]:
    a, b = left.tensors[name], right.tensors[name]
    if a.shape != b.shape:
        return [TensorDifference(name, "shape", f"{list(a.shape)} and {list(b.shape)}")], 0
    out = []
    if a.dtype != b.dtype:
        out.append(TensorDifference(name, "dtype", f"{a.dtype} and {b.dtype}"))
    if not {a.dtype, b.dtype} <= {"BF16", "F32"}:
        return out if a.dtype != b.dtype else _compare_bytes(name, left, right), int(not out)
    dtype = "BF16" if a.dtype == b.dtype == "BF16" else "F32"
    total = Difference()
    row_values = max(1, prod(a.shape[1:]))
    step = max(1, PIECE_VALUES // row_values)
    rows = a.shape[0] if a.shape else 1
    for first in range(0, rows, step):
        count = min(step, rows - first)
        total = total.followed_by(compare(left.rows(a, first, count, dtype), right.rows(b, first, count, dtype)))
    if not total.is_bitwise_equal:
        assert total.first_different is not None
        row, column = divmod(total.first_different, row_values)
        nan = f", {total.num_with_nan} with NaN" if total.num_with_nan else ""
        out.append(
            TensorDifference(
                name,
                "values",
                f"{total.num_different} of {total.num_compared} values, the first at row {row}, column {column}{nan}",
                total.num_different,
                total.num_compared,
                total.max_ulp,
                total.max_abs,
            )
        )
    return out, int(total.is_bitwise_equal)


def _compare_bytes(name: str, left: _Reader, right: _Reader) -> list[TensorDifference]:
    """Tensors that are no floats: equal or not."""
    a, b = left.tensors[name], right.tensors[name]
    rows = a.shape[0] if a.shape else 1
    halves = []
    for reader, tensor in ((left, a), (right, b)):
        bits = np.empty((rows, *a.shape[1:]), element_dtype(tensor.dtype))
        gather_rows(reader.sources, tensor.values, 0, rows, bits)
        halves.append(bits)
    different = int((halves[0] != halves[1]).sum())
    if not different:
        return []
    return [TensorDifference(name, "values", f"{different} of {prod(a.shape)} values", different, prod(a.shape))]
