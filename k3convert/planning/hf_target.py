"""The HF checkpoint to be written: shards with their headers, and the files beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3convert.checkpoint.dtypes import num_bytes
from k3convert.checkpoint.hf_folder import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, open_hf_folder, read_config
from k3convert.checkpoint.json_text import parse_json
from k3convert.checkpoint.member_paths import resolve_member
from k3convert.checkpoint.safetensors_header import TensorEntry, build_header, parse_header
from k3convert.errors import BadMetadata, DigestMismatch
from k3convert.mapping.k3 import EXPERTS_PART, PACKED_SUFFIX, PLAIN_SUFFIX, SCALE_SUFFIX
from k3convert.mapping.roots import RELEASED, Root, detect_root
from k3convert.numerics.digest import digest_hex
from k3convert.planning.hf_sidecar import ASSET_FILES, ASSET_HEADERS, HEADER_SUFFIX, index_file, json_file
from k3convert.planning.inventory import decide_packed, parse_config, take_inventory
from k3convert.planning.manifest import Manifest
from k3model.census import census
from k3model.config import KimiK3Config
from k3model.presets import release_config_dict

TensorLine = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TargetShard:
    """One file to write: its header's bytes and its tensors in the order of their bytes, under the file's names."""

    name: str
    raw: bytes
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=len(self.raw))


@dataclass(frozen=True, slots=True)
class HfTarget:
    """Everything that will lie in the destination; ``files`` are copied, ``small_files`` written."""

    raw_config: Mapping[str, Any]
    config: KimiK3Config
    root: Root
    packed: bool
    shards: tuple[TargetShard, ...]
    files: Mapping[str, Path]
    small_files: Mapping[str, bytes]

    def tensors(self) -> Iterable[tuple[TargetShard, TensorEntry]]:
        """Every tensor with its shard."""
        for shard in self.shards:
            for entry in shard.entries:
                yield shard, entry


def target_like_folder(folder: Path) -> HfTarget:
    """The layout of an HF folder.

    Raises:
        BadInput: it is no checkpoint, or not the one that its config calls for.
    """
    hf = open_hf_folder(folder)
    take_inventory(hf)
    shards = tuple(TargetShard(shard.path.name, shard.raw, shard.entries) for shard in hf.shards)
    return _target(hf.raw_config, folder, shards, {name: folder / name for name in hf.assets})


def target_like_sidecar(folder: Path, manifest: Manifest) -> HfTarget:
    """The layout that a DCP of ours keeps of its source.

    Raises:
        BadMetadata: the sidecar is incomplete.
        DigestMismatch: a kept header is not what the manifest says.
        PathEscape: a kept file is a link that leaves the folder.
    """
    shards: list[TargetShard] = []
    files: dict[str, Path] = {}
    damaged: list[str] = []
    for file in manifest.files:
        name = str(file["name"])
        path = resolve_member(folder, name)
        if name.startswith(ASSET_FILES + "/"):
            files[name.removeprefix(ASSET_FILES + "/")] = path
        elif name.startswith(ASSET_HEADERS + "/"):
            raw = path.read_bytes() if path.is_file() else b""
            if digest_hex(raw) != file["digest"]:
                damaged.append(f"{name} is {'damaged' if raw else 'missing'}")
                continue
            shard = name.removeprefix(ASSET_HEADERS + "/").removesuffix(HEADER_SUFFIX)
            shards.append(TargetShard(shard, raw, parse_header(path, raw, None).entries))
    if damaged:
        raise DigestMismatch(f"{folder}: {len(damaged)} kept shard headers are unusable", offenders=damaged)
    if not shards or CONFIG_NAME not in files:
        raise BadMetadata(f"{folder}: the sidecar has no shard headers or no {CONFIG_NAME}")
    config = read_config(folder / ASSET_FILES)
    return _target(config, folder, tuple(sorted(shards, key=lambda shard: shard.name)), files)


def target_from_config(folder: Path, *, packed: bool, max_shard_bytes: int | None) -> HfTarget:
    """Fresh shards for the config that lies in ``folder``: one a layer, then what is outside the layers.

    Raises:
        BadConfig: there is none, or it is no K3 config.
    """
    raw_config = read_config(folder)
    config = parse_config(raw_config, folder)
    specs = list(census(config, packed=packed))
    lines = [(spec.name, spec.dtype, spec.shapes[0]) for spec in specs]
    groups = [spec.layer_index if spec.component in ("trunk", "routed_experts") else spec.component for spec in specs]
    merged = ["tail" if group in ("embed", "lm_head", "final_norm") else group for group in groups]
    shards = cut_shards(lines, max_shard_bytes, groups=merged)
    target = HfTarget(raw_config, config, RELEASED, packed, shards, {}, {})
    return _with_config_and_index(target)


def with_experts_form(target: HfTarget, *, packed: bool) -> HfTarget:
    """The same layout with the experts packed or plain; config, headers and index follow."""
    if target.packed == packed:
        return target
    shards = []
    for shard in target.shards:
        raw, entries = build_header(_changed_lines(shard.entries, packed=packed))
        shards.append(TargetShard(shard.name, raw, tuple(entries)))
    return _with_config_and_index(replace(target, packed=packed, shards=tuple(shards)))


def with_max_shard_size(target: HfTarget, max_shard_bytes: int) -> HfTarget:
    """The same tensors in the same order, cut into new shards."""
    lines = [(entry.name, entry.dtype, entry.shape) for _, entry in target.tensors()]
    return _with_config_and_index(replace(target, shards=cut_shards(lines, max_shard_bytes)))


def cut_shards(
    lines: Sequence[TensorLine], max_shard_bytes: int | None, *, groups: Sequence[object] | None = None
) -> tuple[TargetShard, ...]:
    """Shards of at most ``max_shard_bytes`` (one tensor at least), a new one at each change of group."""
    pieces: list[list[TensorLine]] = []
    size, last = 0, object()
    for position, line in enumerate(lines):
        nbytes = num_bytes(line[1], line[2])
        group = groups[position] if groups is not None else None
        full = max_shard_bytes is not None and size + nbytes > max_shard_bytes
        if not pieces or full or (groups is not None and group != last):
            pieces.append([])
            size = 0
        pieces[-1].append(line)
        size, last = size + nbytes, group
    shards = []
    for number, piece in enumerate(pieces, start=1):
        raw, entries = build_header(piece)
        shards.append(TargetShard(f"model-{number:05d}-of-{len(pieces):06d}.safetensors", raw, tuple(entries)))
    return tuple(shards)


def _target(
    raw_config: Mapping[str, Any], where: Path, shards: tuple[TargetShard, ...], files: Mapping[str, Path]
) -> HfTarget:
    config = parse_config(raw_config, where)
    names = [entry.name for shard in shards for entry in shard.entries]
    try:
        root = detect_root(names)
    except ValueError as error:
        raise BadMetadata(f"{where}: {error}") from error
    packed = decide_packed(config, {root.to_canonical(name): None for name in names})
    return HfTarget(raw_config, config, root, packed, shards, files, {})


_PAIR = re.compile(re.escape(EXPERTS_PART) + r"\d+\.[A-Za-z0-9_]+(\.weight_packed|\.weight_scale|\.weight)$")


def _changed_lines(entries: Iterable[TensorEntry], *, packed: bool) -> Iterable[TensorLine]:
    for entry in entries:
        found = _PAIR.search(entry.name)
        if found is None:
            yield entry.name, entry.dtype, entry.shape
        elif packed:
            rows, columns = entry.shape
            module = entry.name.removesuffix(PLAIN_SUFFIX)
            yield module + PACKED_SUFFIX, "U8", (rows, columns // 2)
            yield module + SCALE_SUFFIX, "U8", (rows, columns // 32)
        elif found[1] == PACKED_SUFFIX:
            rows, half = entry.shape
            yield entry.name.removesuffix(PACKED_SUFFIX) + PLAIN_SUFFIX, "BF16", (rows, 2 * half)


def _with_config_and_index(target: HfTarget) -> HfTarget:
    """Write the config that fits the experts' form, and an index for the shards."""
    raw_config = quantized_config(target.raw_config, packed=target.packed)
    small = dict(target.small_files)
    files = {name: path for name, path in target.files.items() if name not in (CONFIG_NAME, INDEX_NAME)}
    if raw_config == target.raw_config and CONFIG_NAME in target.files:
        files[CONFIG_NAME] = target.files[CONFIG_NAME]
    else:
        small[CONFIG_NAME] = json_file(raw_config)
    single = len(target.shards) == 1 and target.shards[0].name == SINGLE_NAME
    if not single:
        weight_map = {entry.name: shard.name for shard, entry in target.tensors()}
        total = sum(entry.nbytes for _, entry in target.tensors())
        small[INDEX_NAME] = index_file(weight_map, total)
    return replace(target, raw_config=raw_config, files=files, small_files=small)


def quantized_config(raw_config: Mapping[str, Any], *, packed: bool) -> dict[str, Any]:
    """The config with its quantization block there exactly when the experts are packed.

    A block left beside plain weights makes engines misread them.
    """
    config: dict[str, Any] = parse_json(json_file(raw_config))
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    if packed:
        if "quantization_config" not in inner and "quantization_config" not in config:
            inner["quantization_config"] = release_config_dict()["text_config"]["quantization_config"]
    else:
        inner.pop("quantization_config", None)
        config.pop("quantization_config", None)
    return config
