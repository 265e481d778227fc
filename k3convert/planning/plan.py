"""A conversion plan: destination byte ranges and the source ranges that fill them. Frozen, printable, comparable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from k3convert.planning.inventory import SourceTensor

NO_SLOT = -1
RECORD_BYTES = 600
EncodeOutput = Literal["packed", "scale"]


class Fill(NamedTuple):
    """Constant bytes: framing and headers."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return len(self.data)


class Copy(NamedTuple):
    """Source bytes moved as they are. Their digest goes to ``slot``; ``more`` says that the next part continues it."""

    source: int
    offset: int
    nbytes: int
    slot: int
    more: bool = False
    scales: bool = False


class Decode(NamedTuple):
    """MXFP4 blocks decoded to bf16: 16 packed bytes and 1 scale byte make 64 bytes.

    ``slot`` and ``scale_slot`` take the digests of what is read, ``stored_slot`` that of what is written.
    ``columns`` is the matrix's row length in elements, to name a block in an error.
    """

    packed_source: int
    packed_offset: int
    scale_source: int
    scale_offset: int
    num_blocks: int
    columns: int
    slot: int
    scale_slot: int
    stored_slot: int

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.num_blocks * 64


class Box(NamedTuple):
    """A part of one stored chunk that goes into a tensor being put together.

    ``payload_offset`` is where the chunk's first element lies in the source file, ``chunk_shape`` its shape; ``lo`` and
    ``hi`` bound the part in the chunk's own coordinates. ``at`` is its place in the gathered tensor; where the chunk
    has one dim more (a stack), the part is one expert and its leading dim falls away.
    """

    source: int
    payload_offset: int
    chunk_shape: tuple[int, ...]
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    at: tuple[int, ...]


class Gather(NamedTuple):
    """A tensor of ``shape`` put together from boxes, cast from ``stored_dtype`` to ``dtype``, then ``pad_bytes`` zeros.

    ``slot`` takes the digest of the bytes as they are stored.
    """

    boxes: tuple[Box, ...]
    stored_dtype: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    slot: int
    pad_bytes: int = 0


class ExpectZeros(NamedTuple):
    """Stored padding that is not written; anything but zeros in it is refused under ``name``."""

    values: Gather
    name: str
    nbytes: int = 0


class DecodeGathered(NamedTuple):
    """A packed matrix and its scales, gathered whole and decoded to bf16 of ``nbytes``."""

    packed: Gather
    scale: Gather
    nbytes: int


class Encode(NamedTuple):
    """A matrix quantised to MXFP4; writes its packed bytes or its scales, whose digest goes to ``slot``.

    ``scale`` and ``packed`` are the base's bytes as ``(file, offset)``; without a scale every block gets one by rule,
    without packed bytes the blocks that changed are not counted.
    """

    values: Gather
    scale: tuple[int, int] | None
    packed: tuple[int, int] | None
    rule: str
    output: EncodeOutput
    nbytes: int
    slot: int
    name: str


Op = Fill | Copy | Decode | Gather | ExpectZeros | DecodeGathered | Encode


class Item(NamedTuple):
    """One contiguous range of one destination file, written by one worker in one go: the unit of resume."""

    file: int
    offset: int
    nbytes: int
    ops: tuple[Op, ...]


class SourceFile(NamedTuple):
    """One file that is read, with what tells whether it changed since the plan was made."""

    path: str
    nbytes: int
    fingerprint: str


class DestinationFile(NamedTuple):
    """One file that is written in parts."""

    name: str
    nbytes: int


class RecordRun(NamedTuple):
    """HF tensors that one native tensor holds: a tensor alone, or a stack of experts in the order of their ids.

    Tensor ``i`` has its source's digest in ``slots[i]`` and, where other bytes are stored, theirs in
    ``stored_slots[i]``. Runs, not records: a checkpoint has half a million tensors and three thousand runs.
    """

    group: str
    fqn: str
    tensors: Sequence[SourceTensor]
    is_stack: bool
    slots: range
    transformation: str
    stored_dtype: str
    stored_slots: range | None = None


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Everything that a conversion will do, decided before the first byte is written."""

    job: str
    options: Mapping[str, Any]
    source: str
    destination: str
    sources: tuple[SourceFile, ...]
    files: tuple[DestinationFile, ...]
    items: tuple[Item, ...]
    num_slots: int
    records: tuple[RecordRun, ...]
    expected: Mapping[int, str]
    small_files: Mapping[str, bytes]
    asset_copies: tuple[tuple[str, str], ...]
    finish: Any
    counts: Mapping[str, int]
    notes: tuple[str, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def bytes_to_write(self) -> int:
        """Bytes of the destination's large files."""
        return sum(file.nbytes for file in self.files)

    @property
    def bytes_needed(self) -> int:
        """Space that the destination needs: large files, small files, copies, and the journal."""
        small = sum(len(data) for data in self.small_files.values())
        return self.bytes_to_write + small + RECORD_BYTES * self.num_slots + (1 << 20)

    def slot_name(self, slot: int) -> str:
        """The tensor that a digest slot belongs to."""
        if slot in self.names:
            return self.names[slot]
        for run in self.records:
            for slots in (run.slots, run.stored_slots or range(0)):
                if slot in slots:
                    return run.tensors[slot - slots.start].name
        return f"slot {slot}"

    def summary(self) -> dict[str, Any]:
        """The plan as ``--dry-run`` shows it."""
        return {
            "job": self.job,
            "source": self.source,
            "destination": self.destination,
            "options": dict(self.options),
            "counts": dict(self.counts),
            "num_files": len(self.files),
            "num_items": len(self.items),
            "bytes_to_write": self.bytes_to_write,
            "bytes_needed": self.bytes_needed,
            "largest_file_bytes": max((file.nbytes for file in self.files), default=0),
            "notes": list(self.notes),
        }
