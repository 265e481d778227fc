"""What each operation of a plan does: read, check, digest, transform, write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k3convert.execution.findings import Findings
from k3convert.execution.journal import ItemResult
from k3convert.execution.open_files import SourceFiles
from k3convert.execution.output_stream import OutputStream
from k3convert.execution.quantization_figures import QuantizationFigures
from k3convert.numerics import digest
from k3convert.planning.plan import (
    NO_SLOT,
    ConversionPlan,
    Copy,
    Decode,
    DecodeGathered,
    Encode,
    ExpectZeros,
    Fill,
    Gather,
    Item,
)

if TYPE_CHECKING:
    from k3convert.execution.encoding import ItemEncoder

NAN_SCALE = b"\xff"
NOTHING = memoryview(b"")
BLOCK_PACKED_BYTES = 16
BLOCK_BF16_BYTES = 64


@dataclass(slots=True)
class ItemRunner:
    """Runs items one after another on one thread, with buffers of its own."""

    plan: ConversionPlan
    sources: SourceFiles
    output: OutputStream
    findings: Findings
    scratch: memoryview
    figures: QuantizationFigures | None = None
    _hashers: dict[int, digest.Hasher] = field(default_factory=dict)
    _digests: dict[int, str] = field(default_factory=dict)
    _encoder: ItemEncoder | None = None

    def run(self, item: Item) -> ItemResult:
        """Write one item; the digests of its slots, and what quantising did."""
        self._digests, self.figures = {}, None
        self.output.discarding = self.findings.any
        self.output.begin(item.file, item.offset)
        start = self.output.written_bytes
        for op in item.ops:
            if isinstance(op, Copy):
                self._copy(op)
            elif isinstance(op, Fill):
                self.output.put(op.data)
            elif isinstance(op, Decode):
                self._decode(op)
            else:
                self._encoded(op)
        self.output.flush()
        assert not self._hashers, "an item ended inside a tensor"
        written = self.output.written_bytes - start
        assert written == item.nbytes, f"{written} bytes were produced for an item of {item.nbytes}"
        return ItemResult(self._digests, self.figures)

    def record(self, slot: int, value: str) -> None:
        """Keep the digest of a slot, and compare it with the one that the source recorded."""
        self._digests[slot] = value
        wanted = self.plan.expected.get(slot)
        if wanted is not None and wanted != value:
            name = self.plan.slot_name(slot)
            self.findings.mismatch(f"{name}: {digest.ALGORITHM} {value[:16]}..., recorded {wanted[:16]}...")

    def _copy(self, op: Copy) -> None:
        view = self.output.room(op.nbytes) if op.nbytes else NOTHING
        if len(view) == op.nbytes and not op.more and op.slot not in self._hashers:
            # most tensors of a checkpoint of small ones come this way: one read, one digest
            self.sources.read_into(op.source, view, op.offset)
            self.output.advance(op.nbytes)
            self._watch(op, view)
            if op.slot != NO_SLOT:
                self.record(op.slot, digest.digest_hex(view))
            return
        hasher = None
        if op.slot != NO_SLOT:
            hasher = self._hashers.pop(op.slot, None) or digest.new()
        position, left = op.offset, op.nbytes
        while left:
            view = self.output.room(left)
            self.sources.read_into(op.source, view, position)
            if hasher is not None:
                hasher.update(view)
            self._watch(op, view)
            self.output.advance(len(view))
            position += len(view)
            left -= len(view)
        if hasher is None:
            return
        if op.more:
            self._hashers[op.slot] = hasher
        else:
            self.record(op.slot, hasher.hexdigest())

    def _watch(self, op: Copy, view: memoryview) -> None:
        """Count NaN scale bytes where they may not pass."""
        if op.scales and (num_nan := bytes(view).count(NAN_SCALE)):
            self.findings.nan_scales(f"{self.plan.slot_name(op.slot)}: {num_nan} scale bytes are 255", num_nan)

    def _decode(self, op: Decode) -> None:
        import numpy as np

        from k3convert.numerics.mxfp4_decode import decode

        packed_hasher, scale_hasher, stored_hasher = digest.new(), digest.new(), digest.new()
        per_piece = len(self.scratch) // (BLOCK_PACKED_BYTES + 1)
        done = 0
        while done < op.num_blocks:
            wanted = min(op.num_blocks - done, per_piece)
            view = self.output.room(wanted * BLOCK_BF16_BYTES, BLOCK_BF16_BYTES)
            count = len(view) // BLOCK_BF16_BYTES
            packed_view = self.scratch[: count * BLOCK_PACKED_BYTES]
            scale_view = self.scratch[per_piece * BLOCK_PACKED_BYTES :][:count]
            self.sources.read_into(op.packed_source, packed_view, op.packed_offset + done * BLOCK_PACKED_BYTES)
            self.sources.read_into(op.scale_source, scale_view, op.scale_offset + done)
            packed_hasher.update(packed_view)
            if op.scale_slot != NO_SLOT:
                scale_hasher.update(scale_view)
            packed = np.frombuffer(packed_view, np.uint8).reshape(count, BLOCK_PACKED_BYTES)
            scale = np.frombuffer(scale_view, np.uint8).reshape(count, 1)
            if scale.max() >= 253:
                self.find_unrepresentable(op.slot, op.columns, done, packed, scale)
            if not self.output.discarding:
                out = np.frombuffer(view, np.uint16).reshape(count, BLOCK_BF16_BYTES // 2)
                decode(packed, scale, out)
                stored_hasher.update(view)
            self.output.advance(len(view))
            done += count
        self.record(op.slot, packed_hasher.hexdigest())
        if op.scale_slot != NO_SLOT:
            self.record(op.scale_slot, scale_hasher.hexdigest())
        self.record(op.stored_slot, stored_hasher.hexdigest())

    def find_unrepresentable(self, slot: int, columns: int, first_block: int, packed: Any, scale: Any) -> None:
        """Note the blocks without a finite bf16; both arrays hold the blocks from ``first_block`` on, one a row."""
        from k3convert.numerics.mxfp4_scales import find_unrepresentable

        found = find_unrepresentable(packed, scale)
        if not len(found):
            return
        name = self.plan.slot_name(slot)
        per_row = columns // 32
        lines = []
        for row, _, byte in found:
            block = first_block + row
            lines.append(f"{name}: row {block // per_row}, block {block % per_row}, scale byte {byte}")
        self.findings.unrepresentable(lines, len(found))

    def _encoded(self, op: Gather | ExpectZeros | DecodeGathered | Encode) -> None:
        if self._encoder is None:
            from k3convert.execution.encoding import ItemEncoder

            self._encoder = ItemEncoder(self)
        self._encoder.run(op)
