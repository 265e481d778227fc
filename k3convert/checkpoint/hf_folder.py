"""A Hugging Face checkpoint folder: config, index and shards, cross-checked before a tensor is read."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3convert.checkpoint.json_text import DuplicateKey, parse_json
from k3convert.checkpoint.member_paths import resolve_member, unsafe_reason
from k3convert.checkpoint.regular_files import read_regular, why_unreadable
from k3convert.checkpoint.safetensors_header import ShardHeader, TensorEntry, read_header
from k3convert.errors import BadConfig, BadIndex, BadInput, BadShard, IncompleteCheckpoint, PathEscape

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".gguf", ".ckpt", ".distcp")
LEFT_OUT_FOLDERS = (".git", ".cache")


@dataclass(frozen=True, slots=True)
class Index:
    """``model.safetensors.index.json``: which shard holds which tensor."""

    weight_map: dict[str, str]
    total_size: int | None

    @property
    def shard_names(self) -> list[str]:
        """The shards in the order of their names."""
        return sorted(set(self.weight_map.values()))


@dataclass(frozen=True, slots=True)
class HfFolder:
    """An opened checkpoint: everything but the tensors' bytes."""

    folder: Path
    raw_config: dict[str, Any]
    index: Index | None
    shards: tuple[ShardHeader, ...]
    notes: tuple[str, ...]
    assets: tuple[str, ...]

    def entries(self) -> Iterator[tuple[ShardHeader, TensorEntry]]:
        """Every tensor with its shard, in the order of the files."""
        for shard in self.shards:
            for entry in shard.entries:
                yield shard, entry

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for shard in self.shards for entry in shard.entries)


def looks_like_hf(folder: Path) -> bool:
    """Whether the folder holds safetensors files and no DCP metadata."""
    return not (folder / ".metadata").exists() and (
        (folder / INDEX_NAME).exists() or (folder / CONFIG_NAME).exists() or any(folder.glob("*.safetensors"))
    )


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` as it stands.

    Raises:
        BadConfig: the file is missing or is no JSON object.
    """
    path = folder / CONFIG_NAME
    try:
        document = parse_json(read_regular(path))
    except OSError as error:
        raise BadConfig(
            f"{path} {why_unreadable(path, error)}", hint="a checkpoint needs its config.json beside the weights"
        ) from error
    except ValueError as error:
        raise BadConfig(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise BadConfig(f"{path}: not a JSON object")
    return document


def read_index(path: Path) -> Index:
    """Read an index file (also ``.gz``) and check every shard name in it.

    Raises:
        BadIndex: not an index, or a name listed twice.
        PathEscape: a shard name leaves the folder.
    """
    try:
        stored = read_regular(path)
    except OSError as error:
        raise BadIndex(f"{path} {why_unreadable(path, error)}") from error
    try:
        document = parse_json(gzip.decompress(stored) if path.suffix == ".gz" else stored)
    except DuplicateKey as error:
        raise BadIndex(f"{path}: weight_map has a {error}") from error
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise BadIndex(f"{path}: {error}") from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadIndex(f"{path}: no weight_map, or an empty one")
    by_text = {repr(name): name for name in weight_map.values()}
    escapes = [f"{text} {reason}" for text, name in sorted(by_text.items()) if (reason := unsafe_reason(name))]
    if escapes:
        raise PathEscape(f"{path}: {len(escapes)} shard names are not plain names inside the folder", offenders=escapes)
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(weight_map, total if isinstance(total, int) else None)


def open_hf_folder(folder: Path) -> HfFolder:
    """Open a checkpoint folder and check that config, index and shards belong together.

    Raises:
        BadConfig, BadIndex, BadShard, IncompleteCheckpoint, PathEscape: with every offender of the first kind found.
    """
    raw_config = read_config(folder)
    index_path = folder / INDEX_NAME
    if index_path.exists() or index_path.is_symlink():
        index: Index | None = read_index(resolve_member(folder, INDEX_NAME))
        assert index is not None
        names = index.shard_names
    elif (folder / SINGLE_NAME).exists() or (folder / SINGLE_NAME).is_symlink():
        index, names = None, [SINGLE_NAME]
    else:
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
        raise IncompleteCheckpoint(
            f"{folder}: neither {INDEX_NAME} nor {SINGLE_NAME}"
            + (f", though {len(shards)} safetensors files are there" if shards else ""),
            hint="an index says which shards belong together; fetch it with the weights",
        )
    headers = _read_headers(folder, names)
    notes = _cross_check(index, headers) if index else []
    assets, left_out = list_assets(folder)
    notes += [f"{name} is not part of the checkpoint and is left out" for name in left_out if name not in names]
    return HfFolder(folder, raw_config, index, tuple(headers), tuple(notes), tuple(assets))


def _read_headers(folder: Path, names: list[str]) -> list[ShardHeader]:
    headers: list[ShardHeader] = []
    faults: list[BadInput] = []
    for name in names:
        try:
            headers.append(read_header(resolve_member(folder, name)))
        except (PathEscape, BadShard, IncompleteCheckpoint) as error:
            faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        kind = next(
            kind
            for kind in (PathEscape, BadShard, IncompleteCheckpoint)
            if any(isinstance(fault, kind) for fault in faults)
        )
        raise kind(
            f"{folder}: {len(faults)} of {len(names)} shards named by the index cannot be read",
            offenders=[str(fault) for fault in faults],
            hint=faults[0].hint,
        )
    return headers


def _cross_check(index: Index, headers: list[ShardHeader]) -> list[str]:
    """Compare the index with the headers; returns notes.

    Raises:
        BadIndex: a tensor is missing from its shard, unknown to the index, or in two shards.
    """
    offenders: list[str] = []
    found: dict[str, str] = {}
    num_entries = 0
    for header in headers:
        found.update(dict.fromkeys((entry.name for entry in header.entries), header.path.name))
        num_entries += len(header.entries)
    agree = found == index.weight_map and num_entries == len(found)
    found = {}
    for header in () if agree else headers:
        shard = header.path.name
        for entry in header.entries:
            named = index.weight_map.get(entry.name)
            if entry.name in found:
                offenders.append(f"{entry.name} is in {found[entry.name]} and in {shard}")
            elif named is None:
                offenders.append(f"{entry.name} is in {shard} but not in the index")
            elif named != shard:
                offenders.append(f"{entry.name} is in {shard}, the index says {named}")
            found[entry.name] = shard
    if not agree:
        offenders += [
            f"{name} should be in {shard} but is not" for name, shard in index.weight_map.items() if name not in found
        ]
    if offenders:
        raise BadIndex(
            f"the index and the shards disagree on {len(offenders)} of {len(index.weight_map)} tensors",
            offenders=offenders,
        )
    total = sum(entry.nbytes for header in headers for entry in header.entries)
    if index.total_size is not None and index.total_size != total:
        return [f"the index says total_size {index.total_size}, the shards hold {total}; the shards are right"]
    return []


def list_assets(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the files that belong to the checkpoint, and of those that do not: other weights, linked folders.

    Both are relative to the folder and sorted.

    Raises:
        PathEscape: links that leave the folder, or names that no other system can hold; all of them.
        BadInput: what cannot be copied: dangling links, pipes; all of them.
    """
    assets: list[str] = []
    left_out: list[str] = []
    escapes: list[str] = []
    unreadable: list[str] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT_FOLDERS)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in (*links, *sorted(files)):
            path = Path(parent) / name
            relative = path.relative_to(folder).as_posix()
            if name.endswith(WEIGHT_SUFFIXES) or name.startswith("pytorch_model"):
                left_out.append(relative)
                continue
            try:
                resolve_member(folder, relative)
            except PathEscape as error:
                escapes.append(str(error))
                continue
            if path.is_file():
                assets.append(relative)
            elif path.is_dir():
                left_out.append(relative)
            else:
                what = "a link whose target is missing" if path.is_symlink() else "not a regular file"
                unreadable.append(f"{relative} is {what}")
    if escapes:
        raise PathEscape(f"{folder}: {len(escapes)} files do not stay in the folder", offenders=escapes)
    if unreadable:
        raise BadInput(f"{folder}: {len(unreadable)} files cannot be copied", offenders=unreadable)
    return sorted(assets), sorted(left_out)
