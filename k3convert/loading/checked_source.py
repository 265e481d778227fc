"""A checkpoint of any form, with nothing missing and nothing left over: what a network is filled from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from k3convert.checkpoint.dcp_metadata import METADATA_NAME
from k3convert.checkpoint.hf_folder import CONFIG_NAME, open_hf_folder, read_config
from k3convert.errors import CensusMismatch, UsageError
from k3convert.mapping.k3 import PACKED_SUFFIX, PLAIN_SUFFIX, SCALE_SUFFIX
from k3convert.planning.hf_sidecar import ASSET_FILES
from k3convert.planning.hf_to_dcp import no_garbage_collection, source_file
from k3convert.planning.inventory import (
    ACCEPTED_DTYPES,
    TIED,
    Inventory,
    SourceTensor,
    layer_of,
    parse_config,
    take_inventory,
)
from k3convert.planning.logical_tensors import LogicalCheckpoint, LogicalTensor, open_logical
from k3convert.planning.plan import NO_SLOT, Box, Gather
from k3model.census import TensorSpec, census
from k3model.config import KimiK3Config

# How names of the network begin, under either root and behind a framework's "model."; anything else in a DCP is the
# state of a training run.
_NETWORK_PREFIXES = ("language_model.", "vision_tower.", "mm_projector.", "model.", "lm_head.")


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """A checkpoint whose tensors are those that its config calls for.

    Attributes:
        config: cut to the layers that were asked for.
        checkpoint: how to read each tensor, under its released name.
        dropped: names of tensors of layers that were not asked for.
        left_out: what a DCP holds beside the network: a training run's state.
    """

    config: KimiK3Config
    checkpoint: LogicalCheckpoint
    dropped: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def tensors(self) -> Mapping[str, LogicalTensor]:
        """How to read each tensor, under its released name."""
        return self.checkpoint.tensors


def open_checked(folder: Path, *, num_layers: int | None = None) -> CheckedSource:
    """Open an HF or a DCP folder, and compare what it holds with its config.

    Raises:
        BadInput: one of its kinds: no readable checkpoint, a bad config, tensors missing, left over or of another
            shape or dtype. All offenders are listed.
        UsageError: no folder, or ``num_layers`` is not in 1..num_hidden_layers.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    with no_garbage_collection():
        if (folder / METADATA_NAME).exists():
            return _open_dcp(folder, num_layers)
        return _open_hf(folder, num_layers)


def _open_hf(folder: Path, num_layers: int | None) -> CheckedSource:
    hf = open_hf_folder(folder)
    _cut_config(parse_config(hf.raw_config, folder), num_layers, folder)
    inventory = take_inventory(hf, num_layers=num_layers)
    names = (inventory.root.to_canonical(entry.name) for _, entry in hf.entries())
    tensors = dict(_logical_tensors(inventory))
    files = tuple(source_file(hf, number) for number in range(len(hf.shards)))
    dropped = () if num_layers is None else tuple(name for name in names if (layer_of(name) or 0) >= num_layers)
    return CheckedSource(inventory.config, LogicalCheckpoint(folder, tensors, files), dropped, ())


def _logical_tensors(inventory: Inventory) -> Iterator[tuple[str, LogicalTensor]]:
    """The tensors of a checked HF folder; a packed pair is one tensor under the name of its matrix."""
    for group in inventory.groups:
        for tensor in group.tensors:
            yield tensor.name, LogicalTensor(tensor.dtype, tensor.shape, _whole(tensor))
        for (matrix, leaf), members in group.stacks.items():
            if leaf == PLAIN_SUFFIX[1:]:
                yield from (
                    (member.name, LogicalTensor(member.dtype, member.shape, _whole(member))) for member in members
                )
            elif leaf == PACKED_SUFFIX[1:]:
                for packed, scale in zip(members, group.stacks[matrix, SCALE_SUFFIX[1:]], strict=True):
                    rows, half = packed.shape
                    name = packed.name.removesuffix(PACKED_SUFFIX) + PLAIN_SUFFIX
                    yield name, LogicalTensor("BF16", (rows, 2 * half), _whole(packed), _whole(scale))


def _whole(tensor: SourceTensor) -> Gather:
    """A tensor that lies in one piece."""
    zeros = (0,) * len(tensor.shape)
    box = Box(tensor.shard, tensor.offset, tensor.shape, zeros, tensor.shape, zeros)
    return Gather((box,), tensor.dtype, tensor.dtype, tensor.shape, tensor.nbytes, NO_SLOT)


def _open_dcp(folder: Path, num_layers: int | None) -> CheckedSource:
    whole = parse_config(read_config(_config_folder(folder)), folder)
    config = _cut_config(whole, num_layers, folder)
    checkpoint = open_logical(folder)
    dropped = [name for name in checkpoint.tensors if _is_cut(name, config, whole.text.num_hidden_layers)]
    offenders = _differences(config, checkpoint.tensors, dropped)
    offenders += [f"unexpected: {name}" for name in checkpoint.left_out if name.startswith(_NETWORK_PREFIXES)]
    if offenders:
        raise CensusMismatch(
            f"{folder}: {len(offenders)} differences between its {len(checkpoint.tensors)} tensors and those that its "
            "config calls for",
            offenders=offenders,
        )
    return CheckedSource(config, checkpoint, tuple(dropped), checkpoint.left_out)


def _cut_config(whole: KimiK3Config, num_layers: int | None, folder: Path) -> KimiK3Config:
    depth = whole.text.num_hidden_layers
    if num_layers is None:
        return whole
    if not 1 <= num_layers <= depth:
        raise UsageError(f"num_layers {num_layers}: {folder} has layers 1 to {depth}")
    return whole.with_num_layers(num_layers)


def _config_folder(folder: Path) -> Path:
    """Where a DCP keeps the config: among the files of its source, or beside the weights."""
    kept = folder / ASSET_FILES
    return kept if (kept / CONFIG_NAME).is_file() else folder


def _is_cut(name: str, config: KimiK3Config, depth: int) -> bool:
    layer = layer_of(name)
    return layer is not None and config.text.num_hidden_layers <= layer < depth


def _differences(config: KimiK3Config, tensors: Mapping[str, LogicalTensor], dropped: Iterable[str]) -> list[str]:
    offenders: list[str] = []
    left_over = set(tensors).difference(dropped)
    for spec in census(config, packed=False):
        tensor = tensors.get(spec.name)
        if tensor is not None:
            left_over.discard(spec.name)
            offenders += _misfits(spec, tensor)
        elif not (_is_tied(spec.name, config) and any(name in tensors for name in TIED)):
            offenders.append(f"missing: {spec.name}")
    offenders += [f"unexpected: {name}" for name in sorted(left_over) if not _is_tied(name, config)]
    return offenders


def _is_tied(name: str, config: KimiK3Config) -> bool:
    return config.text.tie_word_embeddings and name in TIED


def _misfits(spec: TensorSpec, tensor: LogicalTensor) -> list[str]:
    found = []
    if tensor.shape not in spec.shapes:
        wanted = " or ".join(str(list(shape)) for shape in spec.shapes)
        found.append(f"shape of {spec.name}: found {list(tensor.shape)}, wanted {wanted}")
    if tensor.dtype not in ACCEPTED_DTYPES[spec.dtype]:
        found.append(f"dtype of {spec.name}: found {tensor.dtype}, wanted {' or '.join(ACCEPTED_DTYPES[spec.dtype])}")
    return found
