"""Faults planted into a copy of a checkpoint, each of which must be refused when it is loaded, by the tensor's name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3convert.checkpoint.dcp_metadata import METADATA_NAME
from k3convert.checkpoint.hf_folder import CONFIG_NAME, INDEX_NAME
from k3convert.errors import K3Error
from k3convert.execution.conversion import RunOptions, run_conversion
from k3convert.loading import load_model
from k3convert.loading.checked_source import open_checked
from k3convert.planning.hf_to_dcp import ToDcpOptions, plan_hf_to_dcp

LAYER = "language_model.model.layers.2."
EXPERT = f"{LAYER}block_sparse_moe.experts.3.w1."
OTHER_EXPERT = f"{LAYER}block_sparse_moe.experts.4.w1."
DECAY = f"{LAYER}self_attn.A_log"
NAN_SCALE = 255
# The folder beside a DCP with an earlier save of it.
OLDER = "older"
CUT_BYTES = 64


@dataclass(frozen=True, slots=True)
class StoredFault:
    """A fault of the files.

    Attributes:
        description: what is wrong, in one line.
        damage: changes a copy of the checkpoint.
        names: what the refusal must name, as a regular expression.
        is_dcp: whether it is a fault of a DCP, to which the copy is converted first.
    """

    description: str
    damage: Callable[[Path], None]
    names: str
    is_dcp: bool = False


def find_refusal(fault: StoredFault, checkpoint: Path, scratch: Path) -> tuple[bool, bool, str]:
    """Damage a copy and load it: whether it was refused, whether by the right name, and what was said."""
    copy = scratch / "damaged"
    if fault.is_dcp:
        _convert(checkpoint, copy)
        _convert(checkpoint, scratch / OLDER, num_layers=num_layers_of(checkpoint) - 1)
    else:
        shutil.copytree(checkpoint, copy)
    try:
        fault.damage(copy)
        load_model(copy)
    except K3Error as error:
        said = "\n".join(error.lines())
        return True, re.search(fault.names, "\n".join((str(error), *error.offenders))) is not None, said
    finally:
        shutil.rmtree(copy)
        shutil.rmtree(scratch / OLDER, ignore_errors=True)
    return False, False, "the damaged checkpoint was loaded without a word"


def num_layers_of(checkpoint: Path) -> int:
    """Of a checkpoint's text decoder."""
    return open_checked(checkpoint).config.text.num_hidden_layers


def _convert(source: Path, destination: Path, num_layers: int | None = None) -> None:
    plan = plan_hf_to_dcp(source, destination, ToDcpOptions(num_layers=num_layers))
    run_conversion(plan, RunOptions(workers=1))


def _use_older_metadata(folder: Path) -> None:
    """The metadata of an earlier save, of fewer layers, over the shards of this one."""
    shutil.copy(folder.parent / OLDER / METADATA_NAME, folder / METADATA_NAME)


def _shard_of(folder: Path, name: str) -> Path:
    weight_map: dict[str, str] = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    return folder / weight_map[name]


def _changes_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        shard = _shard_of(folder, name)
        tensors = load_file(shard)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, shard)

    return damage


def _rename(old: str, new: str) -> Callable[[Path], None]:
    """A tensor under another name, in its shard and in the index."""

    def damage(folder: Path) -> None:
        shard = _shard_of(folder, old)
        tensors = load_file(shard)
        tensors[new] = tensors.pop(old)
        save_file(tensors, shard)
        _edit_json(folder / INDEX_NAME, lambda index: _move(index["weight_map"], old, new))

    return damage


def _store_twice(folder: Path) -> None:
    """An expert's matrix also in the shard of another layer."""
    first = _shard_of(folder, f"{EXPERT}weight_packed")
    second = next(path for path in sorted(folder.glob("*.safetensors")) if path != first)
    tensors = load_file(second)
    tensors[f"{EXPERT}weight_packed"] = load_file(first)[f"{EXPERT}weight_packed"]
    save_file(tensors, second)


def _cut_shard(folder: Path) -> None:
    shard = _shard_of(folder, DECAY)
    shard.write_bytes(shard.read_bytes()[:-CUT_BYTES])


def _fill_tail(decay: Tensor) -> Tensor:
    filled = decay.clone()
    filled[-1] = 1.0
    return filled


def _spoil_scale(scale: Tensor) -> Tensor:
    spoiled = scale.clone()
    spoiled[0, 0] = NAN_SCALE
    return spoiled


def _shift_layers(folder: Path) -> None:
    """The 1-based layer lists written as if they were 0-based."""

    def shift(config: dict[str, Any]) -> None:
        lists = config["text_config"]["linear_attn_config"]
        for key in ("kda_layers", "full_attn_layers"):
            lists[key] = [number - 1 for number in lists[key]]

    _edit_json(folder / CONFIG_NAME, shift)


def _exchange_layer_types(folder: Path) -> None:
    """One KDA and the next, MLA, layer change their places in the lists; g_proj and o_proj would still fit by name."""

    def exchange(config: dict[str, Any]) -> None:
        lists = config["text_config"]["linear_attn_config"]
        lists["kda_layers"] = sorted({*lists["kda_layers"], 4} - {3})
        lists["full_attn_layers"] = sorted({*lists["full_attn_layers"], 3} - {4})

    _edit_json(folder / CONFIG_NAME, exchange)


def _edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def _move(names: dict[str, str], old: str, new: str) -> None:
    names[new] = names.pop(old)


STORED_FAULTS: Mapping[str, StoredFault] = {
    "cut-shard": StoredFault("a shard lacks its last 64 bytes", _cut_shard, ".safetensors"),
    "missing-expert": StoredFault(
        "one matrix of one expert has another name",
        _rename(f"{EXPERT}weight_packed", f"{LAYER}lost"),
        f"{EXPERT}weight",
    ),
    "twofold-expert": StoredFault("one expert's matrix is in two shards", _store_twice, f"{EXPERT}weight_packed"),
    "lost-scale": StoredFault(
        "a packed matrix has no scale", _rename(f"{EXPERT}weight_scale", f"{OTHER_EXPERT}weight_other"), EXPERT
    ),
    "cut-scale": StoredFault(
        "a matrix has a scale column too few: its blocks are not of 32",
        _changes_tensor(f"{EXPERT}weight_scale", lambda scale: scale[:, :-1]),
        f"{EXPERT}weight_scale",
    ),
    "nan-scale": StoredFault(
        "a scale byte is 255, which is no number", _changes_tensor(f"{EXPERT}weight_scale", _spoil_scale), EXPERT
    ),
    "decay-tail": StoredFault(
        "the padding behind A_log's heads is not zero", _changes_tensor(DECAY, _fill_tail), DECAY
    ),
    "bf16-stored-decay": StoredFault(
        "A_log is stored in bf16", _changes_tensor(DECAY, lambda decay: decay.to(torch.bfloat16)), DECAY
    ),
    "shifted-layer-lists": StoredFault("the 1-based layer lists begin at 0", _shift_layers, "kda_layers"),
    "exchanged-layer-types": StoredFault(
        "the types of two layers are exchanged in the lists", _exchange_layer_types, f"{LAYER}self_attn."
    ),
    "stale-metadata": StoredFault(
        "a DCP's metadata is that of an earlier save", _use_older_metadata, r"\.distcp|layers\.\d+\.", is_dcp=True
    ),
}
"""Faults by name."""
