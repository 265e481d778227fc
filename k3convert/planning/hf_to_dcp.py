"""Plans HF -> DCP: every chunk's file, offset and source, from headers alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from k3convert.checkpoint.dcp_metadata import DcpChunk, DcpTensor
from k3convert.checkpoint.dtypes import num_bytes
from k3convert.checkpoint.hf_folder import HfFolder, open_hf_folder
from k3convert.errors import UsageError
from k3convert.mapping.k3 import K3, PACKED_SUFFIX, PLAIN_SUFFIX, SCALE_SUFFIX
from k3convert.mapping.rules import Profile
from k3convert.numerics.digest import digest_hex
from k3convert.planning.dcp_layout import (
    DEFAULT_CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    FileLayout,
    experts_per_chunk,
    row_runs,
)
from k3convert.planning.hf_sidecar import plan_sidecar
from k3convert.planning.inventory import TIED, Group, Inventory, SourceTensor, take_inventory
from k3convert.planning.places import check_places
from k3convert.planning.plan import (
    NO_SLOT,
    ConversionPlan,
    Copy,
    Decode,
    Fill,
    Item,
    Op,
    RecordRun,
    SourceFile,
)

COPIED = "copy"
DECODED = "mxfp4-to-bf16"
LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class ToDcpOptions:
    """What the user may choose. ``experts`` None means: packed where the source is packed."""

    experts: str | None = None
    num_layers: int | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    keep_scales: bool = True
    allow_nan_scales: bool = False
    profile: Profile = K3


@dataclass(slots=True)
class DcpFinish:
    """What is written when every chunk is there: ``.metadata``, records, manifest."""

    inventory: Inventory
    tensors: dict[str, DcpTensor]
    stacks: dict[str, range]
    framing: dict[str, list[tuple[int, bytes]]]
    policy: dict[str, object]
    profile: str
    must_be_equal: tuple[tuple[int, int], ...]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Half a million small records are built and none is garbage: scanning them again and again costs more."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan_hf_to_dcp(source: Path, destination: Path, options: ToDcpOptions) -> ConversionPlan:
    """Plan the conversion of an HF folder; reads headers, config and index, no tensor.

    Raises:
        BadInput: anything wrong with the source, with every offender.
        UsageError: options that contradict the source.
    """
    if not MIN_CHUNK_BYTES <= options.chunk_bytes <= MAX_CHUNK_BYTES:
        raise UsageError(f"--chunk-size {options.chunk_bytes}: between {MIN_CHUNK_BYTES} and {MAX_CHUNK_BYTES} bytes")
    check_places(source, destination)
    with no_garbage_collection():
        inventory = take_inventory(open_hf_folder(source), num_layers=options.num_layers)
        return _Planner(inventory, destination, options).plan()


@dataclass(slots=True)
class _Planner:
    inventory: Inventory
    destination: Path
    options: ToDcpOptions
    layout: FileLayout = field(default_factory=FileLayout)
    items: list[Item] = field(default_factory=list)
    records: list[RecordRun] = field(default_factory=list)
    tensors: dict[str, DcpTensor] = field(default_factory=dict)
    stacks: dict[str, range] = field(default_factory=dict)
    framing: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    num_slots: int = 0
    decode: bool = False

    def plan(self) -> ConversionPlan:
        """Lay out every group and collect the plan."""
        self.decode = self._decode_wanted()
        for group in self.inventory.groups:
            self.layout.start_group()
            for tensor in group.tensors:
                self._plain(group.label, tensor)
            self._experts(group)
        hf = self.inventory.hf
        sidecar = plan_sidecar(self.inventory, truncated=self.options.num_layers is not None)
        policy: dict[str, object] = {
            "experts": "packed"
            if self.inventory.packed and not self.decode
            else "bf16"
            if self.decode
            else "as stored",
            "keep_scales": self.decode and self.options.keep_scales,
            "allow_nan_scales": self.options.allow_nan_scales,
            "num_layers": self.options.num_layers,
            "chunk_bytes": self.options.chunk_bytes,
        }
        finish = DcpFinish(
            self.inventory,
            self.tensors,
            self.stacks,
            self.framing,
            policy,
            self.options.profile.name,
            self._tied_slots(),
        )
        return ConversionPlan(
            job="hf-to-dcp",
            options=policy | {"profile": self.options.profile.name},
            source=str(hf.folder),
            destination=str(self.destination),
            sources=tuple(source_file(hf, position) for position in range(len(hf.shards))),
            files=self.layout.files(),
            items=tuple(self.items),
            num_slots=self.num_slots,
            records=tuple(self.records),
            expected={},
            small_files=sidecar.small_files,
            asset_copies=sidecar.copies,
            finish=finish,
            counts={
                "tensors": sum(len(run.tensors) for run in self.records),
                "dcp_tensors": len(self.tensors),
                "chunks": sum(len(tensor.chunks) for tensor in self.tensors.values()),
                "shards": len(hf.shards),
                "assets": len(sidecar.copies) + sum("/assets/files/" in name for name in sidecar.small_files),
                "source_bytes": sum(tensor.nbytes for run in self.records for tensor in run.tensors),
                "tensors_left_out": self.inventory.num_dropped,
            },
            notes=self.inventory.notes,
        )

    def _decode_wanted(self) -> bool:
        experts = self.options.experts
        if experts not in (None, "packed", "bf16"):
            raise UsageError(f"--experts {experts}: packed or bf16")
        if self.inventory.packed or experts is None:
            return experts == "bf16"
        has_experts = any(group.stacks for group in self.inventory.groups)
        dtypes = {
            tensor.dtype for group in self.inventory.groups for stack in group.stacks.values() for tensor in stack
        }
        if has_experts and (experts == "packed" or dtypes != {"BF16"}):
            raise UsageError(
                f"--experts {experts}: the source's experts are plain {' and '.join(sorted(dtypes))}",
                hint="leave --experts out: plain weights move as they are",
            )
        return False

    def _new_slots(self, count: int) -> range:
        self.num_slots += count
        return range(self.num_slots - count, self.num_slots)

    def _tied_slots(self) -> tuple[tuple[int, int], ...]:
        if not self.inventory.config.text.tie_word_embeddings:
            return ()
        slots = [run.slots[0] for run in self.records if run.tensors[0].name in TIED]
        return ((slots[0], slots[1]),) if len(slots) == 2 else ()

    def _add_item(self, chunk: DcpChunk, number: int, ops: tuple[Op, ...]) -> None:
        self.items.append(Item(number, chunk.offset, chunk.length, ops))
        head, tail = ops[0], ops[-1]
        assert isinstance(head, Fill)
        assert isinstance(tail, Fill)
        framing = self.framing.setdefault(chunk.file, [])
        framing.append((chunk.offset, head.data))
        framing.append((chunk.offset + chunk.length - len(tail.data), tail.data))

    def _plain(self, label: str, tensor: SourceTensor) -> None:
        """A tensor that stands alone: one item, cut into chunks along dim 0."""
        slots = self._new_slots(1)
        runs = row_runs(tensor.dtype, tensor.shape, self.options.chunk_bytes)
        chunks: list[DcpChunk] = []
        position = tensor.offset
        self.layout.start_tensor()
        for number, (first, count) in enumerate(runs):
            sizes = (count, *tensor.shape[1:]) if tensor.shape else ()
            offsets = (first, *(0 for _ in tensor.shape[1:])) if tensor.shape else ()
            chunk, file, frame = self.layout.place(tensor.dtype, offsets, sizes)
            nbytes = num_bytes(tensor.dtype, sizes)
            more = number + 1 < len(runs)
            copy = Copy(tensor.shard, position, nbytes, slots[0], more)
            self._add_item(chunk, file, (Fill(frame.prefix), copy, Fill(frame.suffix)))
            position += nbytes
            chunks.append(chunk)
        if len(runs) > 1:
            self._join_items(len(runs))
        fqn = self.options.profile.to_fqn(tensor.name).fqn
        self.records.append(RecordRun(label, fqn, (tensor,), False, slots, COPIED, tensor.dtype))
        self.tensors[fqn] = DcpTensor(tensor.dtype, tensor.shape, tuple(chunks))

    def _join_items(self, count: int) -> None:
        """Make one item of the last ``count``: their digest runs on, so one worker must write them in order."""
        parts = self.items[-count:]
        del self.items[-count:]
        assert len({part.file for part in parts}) == 1, "a tensor's chunks were placed in two files"
        ops = tuple(op for part in parts for op in part.ops)
        self.items.append(Item(parts[0].file, parts[0].offset, sum(part.nbytes for part in parts), ops))

    def _experts(self, group: Group) -> None:
        if not group.stacks:
            return
        stacks = group.stacks
        largest = max(self._matrix_bytes(leaf, tensors[0]) for (_, leaf), tensors in stacks.items())
        count = len(next(iter(stacks.values())))
        run = experts_per_chunk(count, largest, self.options.chunk_bytes)
        for (matrix, leaf), tensors in stacks.items():
            if self.decode and leaf == SCALE_SUFFIX[1:]:
                if self.options.keep_scales:
                    self._stack(group.label, tensors, run)
                continue
            if self.decode:
                self._decoded_stack(group.label, tensors, stacks[matrix, SCALE_SUFFIX[1:]], run)
            else:
                self._stack(group.label, tensors, run)

    def _matrix_bytes(self, leaf: str, tensor: SourceTensor) -> int:
        return tensor.nbytes * 4 if self.decode and leaf == PACKED_SUFFIX[1:] else tensor.nbytes

    def _stack(self, label: str, tensors: list[SourceTensor], run: int) -> None:
        """Experts moved as bytes, stacked in id order."""
        first = tensors[0]
        is_scale = first.name.endswith(SCALE_SUFFIX)
        slots = self._new_slots(len(tensors))
        watch = is_scale and not self.options.allow_nan_scales
        ops = [
            Copy(tensor.shard, tensor.offset, tensor.nbytes, slot, False, watch)
            for tensor, slot in zip(tensors, slots, strict=True)
        ]
        fqn = self._place_stack(first.name, first.dtype, first.shape, ops, run)
        self.stacks[fqn] = slots
        self.records.append(RecordRun(label, fqn, tensors, True, slots, COPIED, first.dtype))

    def _decoded_stack(self, label: str, packed: list[SourceTensor], scales: list[SourceTensor], run: int) -> None:
        """Experts decoded to bf16; the packed and the decoded bytes are both digested."""
        rows, half = packed[0].shape
        slots, stored_slots = self._new_slots(len(packed)), self._new_slots(len(packed))
        scale_slots = None if self.options.keep_scales else self._new_slots(len(packed))
        ops = [
            Decode(
                weight.shard,
                weight.offset,
                scale.shard,
                scale.offset,
                weight.nbytes // 16,
                2 * half,
                slots[expert],
                NO_SLOT if scale_slots is None else scale_slots[expert],
                stored_slots[expert],
            )
            for expert, (weight, scale) in enumerate(zip(packed, scales, strict=True))
        ]
        name = packed[0].name.removesuffix(PACKED_SUFFIX) + PLAIN_SUFFIX
        fqn = self._place_stack(name, "BF16", (rows, 2 * half), ops, run)
        self.stacks[fqn] = stored_slots
        self.records.append(RecordRun(label, fqn, packed, True, slots, DECODED, "BF16", stored_slots))
        if scale_slots is not None:
            left_out = self.options.profile.to_fqn(scales[0].name).fqn
            self.records.append(RecordRun(label, left_out, scales, True, scale_slots, LEFT_OUT, scales[0].dtype))

    def _place_stack(self, hf_name: str, dtype: str, shape: tuple[int, ...], ops: Sequence[Op], run: int) -> str:
        place = self.options.profile.to_fqn(hf_name)
        chunks = []
        for first in range(0, len(ops), run):
            sizes = (run, *shape)
            self.layout.start_tensor()
            chunk, file, frame = self.layout.place(dtype, (first, *(0 for _ in shape)), sizes)
            self._add_item(chunk, file, (Fill(frame.prefix), *ops[first : first + run], Fill(frame.suffix)))
            chunks.append(chunk)
        self.tensors[place.fqn] = DcpTensor(dtype, (len(ops), *shape), tuple(chunks))
        return place.fqn


def source_file(hf: HfFolder, position: int) -> SourceFile:
    """A shard as a source: its fingerprint is the header's digest and the time of its last change."""
    shard = hf.shards[position]
    changed = shard.path.stat().st_mtime_ns
    return SourceFile(str(shard.path), shard.file_bytes, f"{digest_hex(shard.raw)}@{changed}")
