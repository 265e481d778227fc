"""Operations that compute: gathered tensors cast, packed matrices decoded, plain ones quantised."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from k3convert.execution.gathering import Array, byte_view, element_dtype, gather_rows, row_bytes
from k3convert.execution.quantization_figures import QuantizationFigures
from k3convert.numerics import digest
from k3convert.numerics.casts import bf16_to_float32, float32_to_bf16
from k3convert.numerics.mxfp4_decode import decode
from k3convert.numerics.mxfp4_encode import EncodeStatistics, ScaleRule, encode
from k3convert.planning.plan import NO_SLOT, DecodeGathered, Encode, ExpectZeros, Gather

if TYPE_CHECKING:
    from k3convert.execution.operations import ItemRunner

GROUP_SIZE = 32
MAX_CACHED = 4
FIRST_UNSAFE_SCALE = 253
NAN_SCALE = 255


class ItemEncoder:
    """Runs the computing operations of one worker."""

    def __init__(self, runner: ItemRunner) -> None:
        self._runner = runner
        self._encoded: dict[str, tuple[bytes, bytes]] = {}

    def run(self, op: Gather | ExpectZeros | DecodeGathered | Encode) -> None:
        """Write one operation's bytes."""
        if isinstance(op, Gather):
            self._gather(op)
        elif isinstance(op, ExpectZeros):
            self._expect_zeros(op)
        elif isinstance(op, DecodeGathered):
            self._decode(op)
        else:
            self._encode(op)

    def _rows(self, gather: Gather, hasher: digest.Hasher | None) -> Iterator[tuple[int, Array]]:
        """The gathered tensor a few rows at a time, as bit patterns of the stored dtype."""
        total = gather.shape[0]
        per_piece = max(1, len(self._runner.scratch) // max(1, row_bytes(gather)))
        dtype = element_dtype(gather.stored_dtype)
        for first in range(0, total, per_piece):
            count = min(per_piece, total - first)
            shape = (count, *gather.shape[1:])
            if prod(shape) * np.dtype(dtype).itemsize <= len(self._runner.scratch):
                rows = np.frombuffer(self._runner.scratch, dtype, prod(shape)).reshape(shape)
            else:
                rows = np.empty(shape, dtype)
            gather_rows(self._runner.sources, gather, first, count, rows)
            if hasher is not None:
                hasher.update(byte_view(rows))
            yield first, rows

    def _finish(self, gather: Gather, hasher: digest.Hasher | None) -> None:
        if hasher is not None:
            self._runner.record(gather.slot, hasher.hexdigest())

    def _gather(self, op: Gather) -> None:
        hasher = digest.new() if op.slot != NO_SLOT else None
        for _, rows in self._rows(op, hasher):
            self._put(cast_bits(rows, op.stored_dtype, op.dtype))
        if op.pad_bytes:
            self._runner.output.put(bytes(op.pad_bytes))
        self._finish(op, hasher)

    def _expect_zeros(self, op: ExpectZeros) -> None:
        found = sum(int(np.count_nonzero(rows)) for _, rows in self._rows(op.values, None))
        if found:
            line = f"{op.name}: {found} of the {prod(op.values.shape)} values behind its heads are not zero"
            self._runner.findings.padding(line)

    def _put(self, values: Array) -> None:
        data = byte_view(np.ascontiguousarray(values))
        output, start = self._runner.output, 0
        while start < len(data):
            view = output.room(len(data) - start)
            view[:] = data[start : start + len(view)]
            output.advance(len(view))
            start += len(view)

    def _whole(self, gather: Gather) -> Array:
        out = np.empty(gather.shape, element_dtype(gather.stored_dtype))
        hasher = digest.new() if gather.slot != NO_SLOT else None
        for first, rows in self._rows(gather, hasher):
            out[first : first + len(rows)] = rows
        self._finish(gather, hasher)
        return out

    def _decode(self, op: DecodeGathered) -> None:
        packed, scale = self._whole(op.packed), self._whole(op.scale)
        if scale.size and scale.max() >= FIRST_UNSAFE_SCALE:
            blocks = packed.reshape(-1, GROUP_SIZE // 2)
            self._runner.find_unrepresentable(op.packed.slot, packed.shape[1] * 2, 0, blocks, scale.reshape(-1, 1))
        out = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint16)
        decode(packed, scale, out)
        self._put(out)

    def _encode(self, op: Encode) -> None:
        if op.name not in self._encoded:
            if len(self._encoded) >= MAX_CACHED:
                self._encoded.pop(next(iter(self._encoded)))
            self._encoded[op.name] = self._quantize(op)
            left = 1
        else:
            left = 0
        packed, scale = self._encoded[op.name]
        data = packed if op.output == "packed" else scale
        assert len(data) == op.nbytes, f"{op.name}: {len(data)} bytes for {op.nbytes}"
        self._runner.output.put(data)
        if op.slot != NO_SLOT:
            self._runner.record(op.slot, digest.digest_hex(data))
        if not left:
            del self._encoded[op.name]

    def _quantize(self, op: Encode) -> tuple[bytes, bytes]:
        """Both halves of a matrix; the other one waits for its own operation, which usually is the next."""
        runner, gather = self._runner, op.values
        rows_total, columns = gather.shape
        packed = np.empty((rows_total, columns // 2), np.uint8)
        scale = np.empty((rows_total, columns // GROUP_SIZE), np.uint8)
        source_scale = self._base(op.scale, scale)
        source_packed = self._base(op.packed, packed)
        if source_scale is not None and (num_nan := int((source_scale == NAN_SCALE).sum())):
            runner.findings.nan_scales(f"{op.name}: {num_nan} scale bytes of the base are 255", num_nan)
            source_scale = source_packed = None
        hasher = digest.new() if gather.slot != NO_SLOT else None
        rule = ScaleRule(op.rule)
        if rule is ScaleRule.SOURCE and source_scale is None:
            rule = ScaleRule.COMPRESSED_TENSORS
        total = EncodeStatistics()
        for first, rows in self._rows(gather, hasher):
            part = slice(first, first + len(rows))
            values = rows.view(np.float32) if gather.stored_dtype == "F32" else rows
            statistics = encode(
                values,
                packed[part],
                scale[part],
                rule=rule,
                source_scale=None if source_scale is None else source_scale[part],
                source_packed=None if source_packed is None else source_packed[part],
            )
            if statistics.num_not_finite:
                row, column = statistics.not_finite_at[0]
                runner.findings.not_finite(
                    f"{op.name}: {statistics.num_not_finite} values, the first at row {first + row}, column {column}",
                    statistics.num_not_finite,
                )
            total = total.merged(statistics)
        self._finish(gather, hasher)
        changed = total.num_off_grid if total.num_changed is None else total.num_changed
        mine = QuantizationFigures(
            1,
            int(changed > 0),
            total.num_blocks,
            changed,
            total.num_scale_moved,
            total.num_saturated,
            total.max_abs_error,
            total.max_relative_error,
            op.name,
        )
        runner.figures = mine.merged(runner.figures)
        return packed.tobytes(), scale.tobytes()

    def _base(self, place: tuple[int, int] | None, like: Array) -> Array | None:
        if place is None:
            return None
        out = np.empty(like.shape, np.uint8)
        self._runner.sources.read_into(place[0], byte_view(out), place[1])
        return out


def cast_bits(bits: Array, stored: str, wanted: str) -> Array:
    """Bit patterns of one dtype as those of another: equal, BF16 -> F32 (exact) or F32 -> BF16 (to nearest even).

    Raises:
        ValueError: any other pair.
    """
    if stored == wanted or {stored, wanted} == {"U8", "F8_E8M0"}:
        return bits
    if (stored, wanted) == ("F32", "BF16"):
        out = np.empty(bits.shape, np.uint16)
        float32_to_bf16(bits.view(np.float32), out)
        return out
    if (stored, wanted) == ("BF16", "F32"):
        wide = np.empty(bits.shape, np.float32)
        bf16_to_float32(bits, wide)
        return wide.view(np.uint32)
    raise ValueError(f"no cast from {stored} to {wanted}")
