"""What a DCP keeps of its HF source besides the tensors: every other file, and each shard's header bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3convert.checkpoint.hf_folder import CONFIG_NAME, INDEX_NAME, read_config
from k3convert.checkpoint.safetensors_header import ShardHeader, build_header
from k3convert.planning.inventory import Inventory
from k3model.config import truncated_dict

FOLDER = "k3convert"
ASSET_FILES = f"{FOLDER}/assets/files"
ASSET_HEADERS = f"{FOLDER}/assets/headers"
HEADER_SUFFIX = ".header"
_NUMBERED = re.compile(r"(?P<stem>.*-)(?P<number>\d+)(?P<of>-of-)(?P<count>\d+)(?P<suffix>\.safetensors)")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """Small files by their path under the destination, and files to copy as ``(source path, destination path)``."""

    small_files: Mapping[str, bytes]
    copies: tuple[tuple[str, str], ...]


def plan_sidecar(inventory: Inventory, *, truncated: bool) -> Sidecar:
    """The sidecar of a whole source, or of its first layers: then config, index and headers are rewritten."""
    hf = inventory.hf
    if not truncated:
        small = {f"{ASSET_HEADERS}/{shard.path.name}{HEADER_SUFFIX}": shard.raw for shard in hf.shards}
        copies = tuple((str(hf.folder / name), f"{ASSET_FILES}/{name}") for name in hf.assets)
        return Sidecar(small, copies)
    kept = _kept_entries(inventory)
    renamed = renumber_shards([shard.path.name for shard, _ in kept])
    small = {}
    weight_map: dict[str, str] = {}
    total = 0
    for shard, entries in kept:
        name = renamed[shard.path.name]
        raw, laid_out = build_header(entries, metadata=shard.metadata)
        small[f"{ASSET_HEADERS}/{name}{HEADER_SUFFIX}"] = raw
        weight_map.update(dict.fromkeys((entry[0] for entry in entries), name))
        total += sum(entry.nbytes for entry in laid_out)
    config = truncated_dict(read_config(hf.folder), inventory.config.text.num_hidden_layers)
    small[f"{ASSET_FILES}/{CONFIG_NAME}"] = json_file(config)
    if hf.index is not None:
        small[f"{ASSET_FILES}/{INDEX_NAME}"] = index_file(weight_map, total)
    copies = tuple(
        (str(hf.folder / name), f"{ASSET_FILES}/{name}") for name in hf.assets if name not in (CONFIG_NAME, INDEX_NAME)
    )
    return Sidecar(small, copies)


def renumber_shards(names: list[str]) -> dict[str, str]:
    """New names for a subset of numbered shards, counted anew in the width they had; other names stay."""
    matches = [_NUMBERED.fullmatch(name) for name in names]
    if not all(matches):
        return {name: name for name in names}
    out = {}
    for position, found in enumerate(matches, start=1):
        assert found is not None
        number, count = len(found["number"]), len(found["count"])
        out[found.string] = f"{found['stem']}{position:0{number}d}{found['of']}{len(names):0{count}d}{found['suffix']}"
    return out


def json_file(document: Mapping[str, Any]) -> bytes:
    """A JSON file as Hugging Face libraries write it."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def index_file(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """``model.safetensors.index.json`` for these tensors; ``total_size`` in bytes."""
    return json_file({"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))})


def _kept_entries(inventory: Inventory) -> list[tuple[ShardHeader, list[tuple[str, str, tuple[int, ...]]]]]:
    names = {inventory.root.from_canonical(tensor.name) for tensor in inventory.tensors()}
    out = []
    for shard in inventory.hf.shards:
        entries = [(entry.name, entry.dtype, entry.shape) for entry in shard.entries if entry.name in names]
        if entries:
            out.append((shard, entries))
    return out
