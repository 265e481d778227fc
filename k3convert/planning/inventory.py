"""What an HF checkpoint holds, checked against its config: the input of every plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from k3convert.checkpoint.hf_folder import HfFolder
from k3convert.errors import BadConfig, BadQuantization, CensusMismatch, UnmappedNames, UsageError
from k3convert.mapping.k3 import EXPERTS_PART, PACKED_SUFFIX, PLAIN_SUFFIX, SCALE_SUFFIX
from k3convert.mapping.roots import Root, detect_root
from k3model.census import TensorSpec, census
from k3model.config import ConfigError, KimiK3Config

# what a file may store where the release stores the key: FP32 checkpoints, and E8M0 scales under their own dtype
ACCEPTED_DTYPES: dict[str, tuple[str, ...]] = {
    "BF16": ("BF16", "F32"),
    "F32": ("F32",),
    "U8": ("U8",),
}
SCALE_DTYPES = ("U8", "F8_E8M0")
# above any checkpoint by far: the release has 93 layers and 82,432 experts in all
MAX_LAYERS = 10_000
MAX_EXPERTS = 2_000_000
TIED = ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight")


class SourceTensor(NamedTuple):
    """One tensor of the source under its released name, and where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Group:
    """The tensors of one decoder layer, or of everything outside the layers."""

    label: str
    tensors: list[SourceTensor] = field(default_factory=list)
    stacks: dict[tuple[str, str], list[SourceTensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inventory:
    """A checked source: every tensor the config calls for, none else."""

    hf: HfFolder
    config: KimiK3Config
    root: Root
    packed: bool
    groups: tuple[Group, ...]
    num_dropped: int
    notes: tuple[str, ...]

    def tensors(self) -> Iterator[SourceTensor]:
        """Every tensor, group by group: first those that stand alone, then the experts."""
        for group in self.groups:
            yield from group.tensors
            for stack in group.stacks.values():
                yield from stack


@dataclass(frozen=True, slots=True)
class CensusReport:
    """How the tensors found differ from those that the config calls for."""

    num_expected: int
    num_found: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong_shape: tuple[str, ...]
    wrong_dtype: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.unexpected or self.wrong_shape or self.wrong_dtype)

    def offenders(self) -> list[str]:
        """Every difference as one line."""
        return [
            *(f"missing: {name}" for name in self.missing),
            *(f"unexpected: {name}" for name in self.unexpected),
            *(f"shape of {line}" for line in self.wrong_shape),
            *(f"dtype of {line}" for line in self.wrong_dtype),
        ]


def parse_config(raw: Mapping[str, Any], where: object) -> KimiK3Config:
    """The checked config of a raw ``config.json``.

    Raises:
        BadConfig: with every reason.
    """
    try:
        config = KimiK3Config.from_dict(raw)
        reasons: Sequence[str] = _excesses(config)
    except ConfigError as error:
        reasons = error.reasons
    if reasons:
        raise BadConfig(f"{where}: config.json is no Kimi K3 config, for {len(reasons)} reasons", offenders=reasons)
    return config


def _excesses(config: KimiK3Config) -> list[str]:
    """Counts that no checkpoint has; a census of them would not end."""
    depth = config.text.num_hidden_layers
    experts = depth * config.text.moe.num_experts if config.text.moe is not None else 0
    blocks = config.vision.num_hidden_layers if config.vision is not None else 0
    return [
        f"{name} is {count:,}, at most {limit:,} are read"
        for name, count, limit in (
            ("text_config.num_hidden_layers", depth, MAX_LAYERS),
            ("text_config.num_hidden_layers times num_experts", experts, MAX_EXPERTS),
            ("vision_config.vt_num_hidden_layers", blocks, MAX_LAYERS),
        )
        if count > limit
    ]


def take_inventory(hf: HfFolder, *, num_layers: int | None = None) -> Inventory:
    """Check an opened checkpoint against its config, and sort its tensors by layer.

    Raises:
        BadConfig, UnmappedNames, BadQuantization, CensusMismatch: with every offender.
        UsageError: there are not that many layers.
    """
    config = parse_config(hf.raw_config, hf.folder)
    depth = config.text.num_hidden_layers
    if num_layers is not None and not 1 <= num_layers <= depth:
        raise UsageError(f"--num-layers {num_layers}: the checkpoint has layers 1 to {depth}")
    try:
        root = detect_root(entry.name for _, entry in hf.entries())
    except ValueError as error:
        raise UnmappedNames(f"{hf.folder}: {error}") from error
    kept = config if num_layers is None else config.with_num_layers(num_layers)
    tensors: dict[str, SourceTensor] = {}
    num_dropped = 0
    for position, shard in enumerate(hf.shards):
        for entry_name, dtype, shape, offset, nbytes in shard.entries:
            name = root.to_canonical(entry_name)
            if num_layers is not None and (layer := layer_of(name)) is not None and num_layers <= layer < depth:
                num_dropped += 1
                continue
            tensors[name] = SourceTensor(name, dtype, shape, position, offset, nbytes)
    packed = decide_packed(config, tensors)
    groups, report = _compare(kept, tensors, packed=packed)
    if not report.ok:
        raise CensusMismatch(
            f"{hf.folder}: {len(report.offenders())} differences between the {report.num_found} tensors found and the "
            f"{report.num_expected} that config.json calls for: {len(report.missing)} missing, "
            f"{len(report.unexpected)} unexpected, {len(report.wrong_shape)} of wrong shape, "
            f"{len(report.wrong_dtype)} of wrong dtype",
            offenders=report.offenders(),
        )
    has_experts = any(group.stacks for group in groups)
    notes = _notes(config, root, packed=packed, has_experts=has_experts)
    return Inventory(hf, kept, root, packed, groups, num_dropped, (*hf.notes, *notes))


def layer_of(name: str) -> int | None:
    """The decoder layer that a released name belongs to, or None."""
    marker = ".model.layers."
    at = name.find(marker)
    if at < 0:
        return None
    number = name[at + len(marker) :].split(".", 1)[0]
    return int(number) if number.isdecimal() else None


def decide_packed(config: KimiK3Config, names: Mapping[str, object]) -> bool:
    """Whether the experts are MXFP4, decided by the tensors found and checked against the config.

    Raises:
        BadQuantization: half pairs, pairs beside a plain weight, pairs outside the experts, or both forms at once.
    """
    offenders: list[str] = []
    num_pairs = num_plain = 0
    for name in names:
        if name.endswith(PACKED_SUFFIX):
            module = name.removesuffix(PACKED_SUFFIX)
            num_pairs += 1
            if module + SCALE_SUFFIX not in names:
                offenders.append(f"{name} has no {SCALE_SUFFIX[1:]} beside it")
            if module + PLAIN_SUFFIX in names:
                offenders.append(f"{module} has packed weights and a plain weight")
            if EXPERTS_PART not in name:
                ignored = config.quantization is not None and config.quantization.is_ignored(module)
                offenders.append(
                    f"{module} is packed, "
                    + ("though the quantization config ignores it" if ignored else "though it is no routed expert")
                )
        elif name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) + PACKED_SUFFIX not in names:
            offenders.append(f"{name} has no {PACKED_SUFFIX[1:]} beside it")
        elif EXPERTS_PART in name and name.endswith(PLAIN_SUFFIX):
            num_plain += 1
    if num_pairs and num_plain:
        offenders.append(f"{num_pairs} expert matrices are packed and {num_plain} are not")
    if offenders:
        raise BadQuantization(
            f"{len(offenders)} faults in the packed weights of {num_pairs} expert matrices", offenders=offenders
        )
    return num_pairs > 0


def compare_census(config: KimiK3Config, tensors: Mapping[str, SourceTensor], *, packed: bool) -> CensusReport:
    """Compare tensors under their released names with the config's census."""
    return _compare(config, tensors, packed=packed)[1]


def _compare(
    config: KimiK3Config, tensors: Mapping[str, SourceTensor], *, packed: bool
) -> tuple[tuple[Group, ...], CensusReport]:
    layers = [Group(f"layer-{layer:02d}") for layer in range(config.text.num_hidden_layers)]
    rest = Group("rest")
    missing: list[str] = []
    wrong_shape: list[str] = []
    wrong_dtype: list[str] = []
    num_expected = num_matched = 0
    tied = config.text.tie_word_embeddings
    for spec in census(config, packed=packed):
        num_expected += 1
        tensor = tensors.get(spec.name)
        if tensor is None:
            if not (tied and spec.name in TIED and any(name in tensors for name in TIED)):
                missing.append(spec.name)
            continue
        num_matched += 1
        if tensor.dtype != spec.dtype or tensor.shape != spec.shapes[0]:
            _check(spec, tensor, wrong_shape, wrong_dtype)
        if spec.expert_index is None:
            in_layer = spec.component == "trunk" and spec.layer_index is not None
            (layers[spec.layer_index or 0] if in_layer else rest).tensors.append(tensor)
        else:
            assert spec.layer_index is not None
            _, matrix, leaf = spec.name[spec.name.index(EXPERTS_PART) + len(EXPERTS_PART) :].split(".")
            layers[spec.layer_index].stacks.setdefault((matrix, leaf), []).append(tensor)
    unexpected: list[str] = []
    if num_matched != len(tensors):
        expected = {spec.name for spec in census(config, packed=packed)}
        for name, tensor in tensors.items():
            if name in expected:
                continue
            if tied and name in TIED:
                rest.tensors.append(tensor)
            else:
                unexpected.append(name)
    for layer in layers:
        for stack in layer.stacks.values():
            wrong_dtype += _mixed_dtypes(stack)
    report = CensusReport(
        num_expected, len(tensors), tuple(missing), tuple(unexpected), tuple(wrong_shape), tuple(wrong_dtype)
    )
    return (*layers, rest), report


def _mixed_dtypes(stack: list[SourceTensor]) -> list[str]:
    """The tensors of a stack whose dtype is not that of most."""
    counts = Counter(tensor.dtype for tensor in stack)
    if len(counts) == 1:
        return []
    wanted = counts.most_common(1)[0][0]
    return [
        f"{tensor.name}: found {tensor.dtype}, its fellow experts have {wanted}"
        for tensor in stack
        if tensor.dtype != wanted
    ]


def _check(spec: TensorSpec, tensor: SourceTensor, wrong_shape: list[str], wrong_dtype: list[str]) -> None:
    if tensor.shape != spec.shapes[0] and tensor.shape not in spec.shapes:
        wanted = " or ".join(str(list(shape)) for shape in spec.shapes)
        wrong_shape.append(f"{spec.name}: found {list(tensor.shape)}, wanted {wanted}")
    if tensor.dtype != spec.dtype:
        accepted = SCALE_DTYPES if spec.name.endswith(SCALE_SUFFIX) else ACCEPTED_DTYPES[spec.dtype]
        if tensor.dtype not in accepted:
            wrong_dtype.append(f"{spec.name}: found {tensor.dtype}, wanted {' or '.join(accepted)}")


def _notes(config: KimiK3Config, root: Root, *, packed: bool, has_experts: bool) -> list[str]:
    notes = [f"config.json has the unknown field {key}" for key in config.unknown_keys]
    if root.name != "language_model":
        notes.append("the text tower's names begin with model., not with language_model.model.")
    if has_experts and packed != (config.quantization is not None):
        notes.append(
            "config.json declares no quantization, the experts are packed MXFP4: the tensors decide"
            if packed
            else "config.json declares MXFP4 experts, the experts are plain: the tensors decide"
        )
    return notes
