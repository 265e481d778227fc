"""Plans DCP -> HF: every byte of every shard, from metadata and headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from k3convert.checkpoint.dcp_metadata import METADATA_NAME, DcpTensor
from k3convert.checkpoint.dtypes import num_bytes
from k3convert.checkpoint.hf_folder import CONFIG_NAME, looks_like_hf
from k3convert.checkpoint.safetensors_header import TensorEntry
from k3convert.errors import BadMetadata, CensusMismatch, UsageError
from k3convert.mapping.k3 import EXPERTS_PART, K3, PACKED_SUFFIX, PLAIN_SUFFIX, SCALE_SUFFIX
from k3convert.mapping.rules import Profile, Slot
from k3convert.numerics.digest import digest_hex
from k3convert.planning.base_experts import BaseExperts, experts_of_dcp, experts_of_folder, no_experts
from k3convert.planning.dcp_source import ChunkReader, DcpSource, contiguous_ranges, open_dcp
from k3convert.planning.decay_padding import num_padding, split_rows
from k3convert.planning.hf_sidecar import ASSET_FILES
from k3convert.planning.hf_target import (
    HfTarget,
    TargetShard,
    target_from_config,
    target_like_folder,
    target_like_sidecar,
    with_experts_form,
    with_max_shard_size,
)
from k3convert.planning.hf_to_dcp import no_garbage_collection
from k3convert.planning.manifest import Manifest, StoredRecord, has_manifest, read_manifest
from k3convert.planning.places import check_places
from k3convert.planning.plan import (
    NO_SLOT,
    Box,
    ConversionPlan,
    Copy,
    DecodeGathered,
    DestinationFile,
    Encode,
    EncodeOutput,
    ExpectZeros,
    Fill,
    Gather,
    Item,
    Op,
    SourceFile,
)

ITEM_BYTES = 64 << 20
SCALE_RULES = ("source", "compressed-tensors", "ocp-floor", "ceil")
CASTS = {("F32", "BF16"), ("BF16", "F32"), ("U8", "F8_E8M0"), ("F8_E8M0", "U8")}
FLOATS = ("BF16", "F32")


@dataclass(frozen=True, slots=True)
class ToHfOptions:
    """What the user may choose. ``experts`` None means: as the base or the source has them."""

    like: Path | None = None
    experts: str | None = None
    scale_rule: str = "compressed-tensors"
    max_shard_bytes: int | None = None
    profile: Profile = K3


@dataclass(frozen=True, slots=True)
class HfFinish:
    """What is written when every shard is there, and the digests that copied files must have."""

    small_files: Mapping[str, bytes]
    asset_digests: Mapping[str, str]
    left_out: tuple[str, ...]


def plan_dcp_to_hf(source: Path, destination: Path, options: ToHfOptions) -> ConversionPlan:
    """Plan the way back; reads metadata, manifest, and the base's headers, no tensor.

    Raises:
        BadInput: anything wrong with source or base, with every offender.
        UsageError: nothing says how the checkpoint is to look.
    """
    if options.experts not in (None, "packed", "bf16"):
        raise UsageError(f"--experts {options.experts}: packed or bf16")
    if options.scale_rule not in SCALE_RULES:
        raise UsageError(f"--scale-rule {options.scale_rule}: one of {', '.join(SCALE_RULES)}")
    if options.max_shard_bytes is not None and options.max_shard_bytes < 1:
        raise UsageError(f"--max-shard-size {options.max_shard_bytes}: at least 1 byte")
    for folder in (source, options.like):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{folder} is not a folder")
    if not (source / METADATA_NAME).exists():
        raise BadMetadata(
            f"{source / METADATA_NAME} is missing",
            hint="hf-to-dcp converts a Hugging Face folder"
            if looks_like_hf(source)
            else "a DCP folder without .metadata is not a finished checkpoint",
        )
    check_places(source, destination)
    if options.like is not None and options.like.resolve() != destination.resolve():  # --overwrite may replace the base
        check_places(options.like, destination, what="base")
    with no_garbage_collection():
        return _make_planner(source, destination, options).plan()


def _make_planner(folder: Path, destination: Path, options: ToHfOptions) -> _Planner:
    profile = options.profile
    own = read_manifest(folder) if has_manifest(folder) and options.like is None else None
    base_source: DcpSource | None = None
    base_files: tuple[SourceFile, ...] = ()
    if own is not None:
        target = target_like_sidecar(folder, own)
    elif options.like is not None and has_manifest(options.like):
        manifest = read_manifest(options.like)
        target = target_like_sidecar(options.like, manifest)
        base_source = open_dcp(options.like, profile, None)
    elif options.like is not None:
        target = target_like_folder(options.like)
        base_files = tuple(
            SourceFile(str(path), path.stat().st_size, f"{path.stat().st_mtime_ns}")
            for path in (options.like / shard.name for shard in target.shards)
        )
    elif (folder / CONFIG_NAME).is_file():
        probe = open_dcp(folder, profile, None)
        packed = options.experts == "packed" or (
            options.experts is None and any(name.endswith(PACKED_SUFFIX) for name in probe.tensors)
        )
        target = target_from_config(folder, packed=packed, max_shard_bytes=options.max_shard_bytes)
    else:
        raise UsageError(
            f"{folder} is a DCP of another tool and has no {CONFIG_NAME}: nothing says how the checkpoint should look",
            hint="--like BASE names a Hugging Face folder, or a DCP of ours, to take config, names and scales from",
        )
    original = target
    if options.experts is not None:
        target = with_experts_form(target, packed=options.experts == "packed")
    if options.max_shard_bytes is not None:
        target = with_max_shard_size(target, options.max_shard_bytes)
    experts = _ExpertSlots(profile)
    source = open_dcp(folder, profile, _wanted_fqns(target, profile, experts))
    reader = ChunkReader(source, 0)
    files = source.files
    if base_source is not None:
        base = experts_of_dcp(base_source, len(files), profile)
        files += base_source.files
    elif base_files:
        base = experts_of_folder(original, len(files))
        files += base_files
    elif any(_is_kept_scale(native, source) for native in source.tensors):
        base = experts_of_dcp(source, 0, profile)
    else:
        base = no_experts()
    return _Planner(source, destination, options, target, reader, base, files, own, experts)


class _ExpertSlots:
    """Where an expert matrix may lie: its packed bytes, its scales, its plain weight. Each matrix is mapped once."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._known: dict[str, tuple[Slot, Slot, Slot]] = {}

    def of(self, module: str) -> tuple[Slot, Slot, Slot]:
        """The slots of a module's packed bytes, scales and plain weight."""
        found = self._known.get(module)
        if found is None:
            to_fqn = self._profile.to_fqn
            found = to_fqn(module + PACKED_SUFFIX), to_fqn(module + SCALE_SUFFIX), to_fqn(module + PLAIN_SUFFIX)
            self._known[module] = found
        return found

    def place(self, name: str) -> Slot:
        """The slot of one tensor of a module."""
        module, _, leaf = name.rpartition(".")
        packed, scale, plain = self.of(module)
        return {PACKED_SUFFIX: packed, SCALE_SUFFIX: scale, PLAIN_SUFFIX: plain}.get(
            "." + leaf
        ) or self._profile.to_fqn(name)


def _wanted_fqns(target: HfTarget, profile: Profile, experts: _ExpertSlots) -> frozenset[str]:
    """The FQNs that the target's tensors may come from: stacks of either form, and everything else."""
    wanted = set()
    for _, entry in target.tensors():
        name = target.root.to_canonical(entry.name)
        if EXPERTS_PART in name:
            wanted.add(experts.place(name).fqn)
            wanted.update(slot.fqn for slot in experts.of(_module(name)))
        else:
            wanted.add(profile.to_fqn(name).fqn)
    return frozenset(wanted)


def _is_kept_scale(native: str, source: DcpSource) -> bool:
    """Whether an FQN is a stack of scales beside the stack of the plain weights decoded with them."""
    return native.endswith(SCALE_SUFFIX) and native.removesuffix(SCALE_SUFFIX) in source.tensors


def _module(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass(slots=True)
class _Planner:
    source: DcpSource
    destination: Path
    options: ToHfOptions
    target: HfTarget
    reader: ChunkReader
    base: BaseExperts
    files: tuple[SourceFile, ...]
    own: Manifest | None
    experts: _ExpertSlots
    records: dict[str, StoredRecord] = field(default_factory=dict)
    expected: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_widened: int = 0
    num_rounded: int = 0
    largest_matrix: int = 0
    used: set[str] = field(default_factory=set)

    def plan(self) -> ConversionPlan:
        """Lay out every shard and collect the plan."""
        if self.own is not None:
            self.records = {self.target.root.to_canonical(record.name): record for record in self.own.records()}
        items: list[Item] = []
        for number, shard in enumerate(self.target.shards):
            items += self._shard_items(number, shard)
        self._refuse_faults()
        asset_digests = self._asset_digests()
        left_out = tuple(sorted({*self.source.left_out, *self._unused()}))
        if self.source.prefix:
            self.notes.append(f"the DCP's names carry the prefix {self.source.prefix}")
        if left_out and self.own is None:
            self.notes.append(f"{len(left_out)} entries are no tensors of the model and are left out")
        if self.num_widened:
            self.notes.append(f"{self.num_widened} tensors are stored as BF16 and become F32, as the base has them")
        options = {
            "experts": "packed" if self.target.packed else "bf16",
            "scale_rule": self.options.scale_rule,
            "like": str(self.options.like) if self.options.like else None,
            "max_shard_bytes": self.options.max_shard_bytes,
            "profile": self.options.profile.name,
            "metadata_digest": digest_hex(self.source.metadata_bytes),
        }
        return ConversionPlan(
            job="dcp-to-hf",
            options=options,
            source=str(self.source.folder),
            destination=str(self.destination),
            sources=self.files,
            files=tuple(DestinationFile(shard.name, shard.nbytes) for shard in self.target.shards),
            items=tuple(items),
            num_slots=len(self.names),
            records=(),
            expected=self.expected,
            small_files=self.target.small_files,
            asset_copies=tuple((str(path), name) for name, path in self.target.files.items()),
            finish=HfFinish(self.target.small_files, asset_digests, left_out),
            counts={
                "tensors": sum(len(shard.entries) for shard in self.target.shards),
                "shards": len(self.target.shards),
                "assets": len(self.target.files) + len(self.target.small_files),
                "entries_left_out": len(left_out),
                "tensors_rounded": self.num_rounded,
                "largest_matrix_bytes": self.largest_matrix,
            },
            notes=tuple(self.notes),
            names=self.names,
        )

    def _shard_items(self, number: int, shard: TargetShard) -> list[Item]:
        items: list[Item] = []
        ops: list[Op] = [Fill(shard.raw)]
        start, end = 0, len(shard.raw)
        previous = ""
        for entry in shard.entries:
            paired = EXPERTS_PART in entry.name and _module(entry.name) == previous
            if end - start >= ITEM_BYTES and not paired:
                items.append(Item(number, start, end - start, tuple(ops)))
                ops, start = [], end
            ops += self._ops(entry)
            end = entry.offset + entry.nbytes
            previous = _module(entry.name)
        items.append(Item(number, start, end - start, tuple(ops)))
        return items

    def _slot(self, name: str, expected: str | None) -> int:
        slot = len(self.names)
        self.names[slot] = name
        if expected is not None:
            self.expected[slot] = expected
        return slot

    def _ops(self, entry: TensorEntry) -> list[Op]:
        name = self.target.root.to_canonical(entry.name)
        tensors = self.source.tensors
        if EXPERTS_PART not in name:
            fqn = self.options.profile.to_fqn(name).fqn
            if fqn in tensors:
                return self._moved(entry, name, fqn, None)
            self.missing.append(name)
            return []
        module, place = _module(name), self.experts.place(name)
        packed, scale, plain = self.experts.of(module)
        self.largest_matrix = max(self.largest_matrix, 2 * entry.nbytes)
        if name.endswith(PLAIN_SUFFIX) and plain.fqn not in tensors:
            if packed.fqn in tensors and scale.fqn in tensors:
                return self._decoded(entry, module, packed.fqn, scale.fqn, packed.expert)
        elif packed.fqn in tensors or name.endswith(PLAIN_SUFFIX):
            if place.fqn in tensors:
                return self._moved(entry, name, place.fqn, place.expert)
        elif plain.fqn in tensors:
            if self.own is not None and name.endswith(SCALE_SUFFIX) and scale.fqn in tensors:
                return self._moved(entry, name, scale.fqn, scale.expert)
            return self._encoded(entry, module, plain.fqn, plain.expert)
        self.missing.append(name)
        return []

    def _recorded(self, name: str) -> str | None:
        """The digest of what the DCP stores for an HF tensor that was moved as bytes."""
        record = self.records.get(name)
        return record.digest if record is not None and record.stored_digest is None else None

    def _decoded_digest(self, module: str) -> str | None:
        record = self.records.get(module + PACKED_SUFFIX) or self.records.get(module + PLAIN_SUFFIX)
        return None if record is None else record.stored_digest or record.digest

    def _boxes(self, fqn: str, index: int | None, name: str) -> tuple[DcpTensor, tuple[int, ...], list[Box]]:
        """The stored tensor, the shape of one of its HF tensors, and where that lies."""
        tensor = self.source.tensors[fqn]
        self.used.add(fqn)
        shape = tensor.shape[1:] if index is not None else tensor.shape
        if index is not None and not (tensor.shape and 0 <= index < tensor.shape[0]):
            self.wrong.append(f"{name}: the stack {fqn} is {list(tensor.shape)}, it has no expert {index}")
            return tensor, shape, []
        return tensor, shape, self.reader.boxes(fqn, index)

    def _moved(self, entry: TensorEntry, name: str, fqn: str, index: int | None) -> list[Op]:
        tensor, shape, boxes = self._boxes(fqn, index, name)
        pad = self._padding(name, entry, shape)
        if pad is None:
            self.wrong.append(f"{name}: stored {list(shape)}, wanted {list(entry.shape)}")
            return []
        if tensor.dtype != entry.dtype and (tensor.dtype, entry.dtype) not in CASTS:
            self.wrong.append(f"{name}: stored {tensor.dtype}, wanted {entry.dtype}")
            return []
        self.num_widened += (tensor.dtype, entry.dtype) == ("BF16", "F32")
        self.num_rounded += (tensor.dtype, entry.dtype) == ("F32", "BF16")
        if pad < 0:
            return self._cut(entry, name, tensor, boxes)
        slot = self._slot(name, self._recorded(name))
        ranges = contiguous_ranges(boxes, tensor.dtype)
        same = num_bytes(tensor.dtype, (1,)) == num_bytes(entry.dtype, (1,))
        if ranges is not None and same:
            copies: list[Op] = [
                Copy(source, offset, nbytes, slot, position + 1 < len(ranges))
                for position, (source, offset, nbytes) in enumerate(ranges)
            ]
            if not ranges:
                copies = [Copy(0, 0, 0, slot)]
            return [*copies, Fill(bytes(pad))] if pad else copies
        body = entry.nbytes - pad
        return [Gather(tuple(boxes), tensor.dtype, entry.dtype, shape or (1,), body, slot, pad)]

    def _cut(self, entry: TensorEntry, name: str, tensor: DcpTensor, boxes: list[Box]) -> list[Op]:
        """A tensor without the zeros that are stored behind it."""
        kept, tail = split_rows(boxes, entry.shape[0])
        slot = self._slot(name, None)
        shape = (tensor.shape[0] - entry.shape[0],)
        nothing = ExpectZeros(Gather(tuple(tail), tensor.dtype, tensor.dtype, shape, 0, NO_SLOT), name)
        return [nothing, Gather(tuple(kept), tensor.dtype, entry.dtype, entry.shape, entry.nbytes, slot)]

    def _padding(self, name: str, entry: TensorEntry, shape: tuple[int, ...]) -> int | None:
        """Zero bytes to append (below 0: to take away), or None when the shapes do not belong together."""
        if shape == entry.shape:
            return 0
        values = num_padding(self.target.config, name, shape, entry.shape)
        if values is not None:
            return values * num_bytes(entry.dtype, (1,))
        squeezed = [tuple(dim for dim in dims if dim != 1) for dims in (shape, entry.shape)]
        if name.endswith("_conv1d.weight") and squeezed[0] == squeezed[1] and prod(shape) == prod(entry.shape):
            return 0
        return None

    def _values(self, module: str, fqn: str, index: int | None, shape: tuple[int, ...]) -> Gather | None:
        """The plain matrix of an expert as it is stored, of the shape that the target calls for."""
        tensor, stored, boxes = self._boxes(fqn, index, module)
        if stored != shape or tensor.dtype not in FLOATS:
            self.wrong.append(f"{module}: stored {tensor.dtype} {list(stored)}, wanted BF16 or F32 {list(shape)}")
            return None
        slot = self._slot(module + PLAIN_SUFFIX, self._decoded_digest(module))
        return Gather(tuple(boxes), tensor.dtype, tensor.dtype, stored, num_bytes(tensor.dtype, stored), slot)

    def _encoded(self, entry: TensorEntry, module: str, fqn: str, index: int | None) -> list[Op]:
        is_scale = entry.name.endswith(SCALE_SUFFIX)
        output: EncodeOutput = "scale" if is_scale else "packed"
        rows, columns = entry.shape
        values = self._values(module, fqn, index, (rows, columns * (32 if is_scale else 2)))
        if values is None:
            return []
        scale, packed = self.base.places(module)
        unchanged = self.own is not None and scale is not None
        record = self.records.get(module + (SCALE_SUFFIX if is_scale else PACKED_SUFFIX)) if unchanged else None
        slot = self._slot(entry.name, record.digest if record is not None else None)
        rule = self.options.scale_rule
        return [Encode(values, scale, packed, rule, output, entry.nbytes, slot, module)]

    def _decoded(self, entry: TensorEntry, module: str, packed: str, scale: str, index: int | None) -> list[Op]:
        halves = []
        for fqn, leaf, per_column in ((packed, PACKED_SUFFIX, 2), (scale, SCALE_SUFFIX, 32)):
            tensor, shape, boxes = self._boxes(fqn, index, module)
            wanted = (entry.shape[0], entry.shape[1] // per_column)
            if shape != wanted or num_bytes(tensor.dtype, (1,)) != 1:
                self.wrong.append(f"{module}{leaf}: stored {tensor.dtype} {list(shape)}, wanted U8 {list(wanted)}")
                return []
            slot = self._slot(module + leaf, self._recorded(module + leaf))
            halves.append(Gather(tuple(boxes), "U8", "U8", shape, prod(shape), slot))
        return [DecodeGathered(halves[0], halves[1], entry.nbytes)]

    def _unused(self) -> list[str]:
        """Entries that no tensor came from; scales kept beside decoded experts are a help, not an entry."""
        return [
            stored
            for native, stored in self.source.stored_names.items()
            if native not in self.used and not _is_kept_scale(native, self.source)
        ]

    def _asset_digests(self) -> dict[str, str]:
        if self.own is None:
            return {}
        prefix = ASSET_FILES + "/"
        return {
            str(file["name"]).removeprefix(prefix): str(file["digest"])
            for file in self.own.files
            if str(file["name"]).startswith(prefix)
        }

    def _refuse_faults(self) -> None:
        unexpected = self.source.unexpected
        if not self.missing and not self.wrong and not unexpected:
            return
        offenders = [
            *(f"missing: {name}" for name in self.missing),
            *(f"unexpected: {name}" for name in unexpected),
            *self.wrong,
        ]
        raise CensusMismatch(
            f"{self.source.folder} does not hold the wanted checkpoint: {len(self.missing)} tensors are missing, "
            f"{len(unexpected)} unexpected, {len(self.wrong)} have the wrong shape or dtype",
            offenders=offenders,
            hint="entries it does hold: " + ", ".join(self.source.left_out[:3]) if self.source.left_out else None,
        )
