"""A checkpoint of any form as plain tensors under released names: a packed pair is one matrix of bf16 values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from k3convert.checkpoint.dcp_metadata import METADATA_NAME
from k3convert.checkpoint.dtypes import num_bytes
from k3convert.checkpoint.hf_folder import CONFIG_NAME, open_hf_folder, read_config
from k3convert.errors import BadQuantization, UnmappedNames, UsageError
from k3convert.mapping.k3 import K3, PACKED_SUFFIX, PLAIN_SUFFIX, SCALE_SUFFIX
from k3convert.mapping.roots import detect_root
from k3convert.planning.dcp_source import ChunkReader, open_dcp
from k3convert.planning.hf_sidecar import ASSET_FILES
from k3convert.planning.hf_to_dcp import no_garbage_collection, source_file
from k3convert.planning.inventory import SCALE_DTYPES, decide_packed, parse_config
from k3convert.planning.plan import NO_SLOT, Box, Gather, SourceFile
from k3model.census import census


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor: ``values`` as stored, and ``scale`` where they are packed MXFP4."""

    dtype: str
    shape: tuple[int, ...]
    values: Gather
    scale: Gather | None = None


@dataclass(frozen=True, slots=True)
class LogicalCheckpoint:
    """All tensors of a checkpoint, the files they are read from, and what else a DCP holds."""

    path: Path
    tensors: Mapping[str, LogicalTensor]
    files: tuple[SourceFile, ...]
    left_out: tuple[str, ...] = ()


def open_logical(path: Path) -> LogicalCheckpoint:
    """Open an HF folder or a DCP folder.

    Raises:
        BadInput: it is no readable checkpoint.
        UsageError: it is no folder.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder")
    with no_garbage_collection():
        return _open_dcp(path) if (path / METADATA_NAME).exists() else _open_hf(path)


def _open_hf(folder: Path) -> LogicalCheckpoint:
    hf = open_hf_folder(folder)
    try:
        root = detect_root(entry.name for _, entry in hf.entries())
    except ValueError as error:
        raise UnmappedNames(f"{folder}: {error}") from error
    stored: dict[str, Gather] = {}
    for number, shard in enumerate(hf.shards):
        for entry in shard.entries:
            shape = entry.shape or (1,)
            zeros = tuple(0 for _ in shape)
            box = Box(number, entry.offset, shape, zeros, shape, zeros)
            boxes = (box,) if entry.nbytes else ()
            stored[root.to_canonical(entry.name)] = Gather(
                boxes, entry.dtype, entry.dtype, shape, entry.nbytes, NO_SLOT
            )
    files = tuple(source_file(hf, number) for number in range(len(hf.shards)))
    decide_packed(parse_config(hf.raw_config, folder), stored)
    return LogicalCheckpoint(folder, _joined(folder, stored), files)


def _open_dcp(folder: Path) -> LogicalCheckpoint:
    kept = folder / ASSET_FILES if (folder / ASSET_FILES / CONFIG_NAME).is_file() else folder
    wanted = None
    if (kept / CONFIG_NAME).is_file():
        config = parse_config(read_config(kept), kept)
        wanted = frozenset(
            K3.to_fqn(spec.name).fqn for packed in (True, False) for spec in census(config, packed=packed)
        )
    source = open_dcp(folder, K3, wanted)
    reader = ChunkReader(source, 0)
    stored: dict[str, Gather] = {}
    for fqn, tensor in source.tensors.items():
        is_stack = K3.is_stack(fqn)
        shape = (tensor.shape[1:] if is_stack else tensor.shape) or (1,)
        for expert in range(tensor.shape[0]) if is_stack else (None,):
            boxes = tuple(reader.boxes(fqn, expert))
            nbytes = num_bytes(tensor.dtype, shape) if prod(shape) else 0
            stored[K3.to_hf(fqn, expert)] = Gather(boxes, tensor.dtype, tensor.dtype, shape, nbytes, NO_SLOT)
    return LogicalCheckpoint(folder, _joined(folder, stored), source.files, source.left_out)


def _joined(where: Path, stored: Mapping[str, Gather]) -> dict[str, LogicalTensor]:
    """Pairs become one tensor; scales kept beside a plain matrix are no tensor of their own.

    Raises:
        BadQuantization: packed weights and scales that do not belong together, all of them.
    """
    out: dict[str, LogicalTensor] = {}
    offenders: list[str] = []
    for name, gather in stored.items():
        if name.endswith(SCALE_SUFFIX):
            module = name.removesuffix(SCALE_SUFFIX)
            if module + PACKED_SUFFIX not in stored and module + PLAIN_SUFFIX not in stored:
                offenders.append(f"{name} has no {PACKED_SUFFIX[1:]} beside it")
        elif not name.endswith(PACKED_SUFFIX):
            out[name] = LogicalTensor(gather.stored_dtype, gather.shape, gather)
        else:
            module = name.removesuffix(PACKED_SUFFIX)
            scale = stored.get(module + SCALE_SUFFIX)
            if fault := _pair_fault(gather, scale):
                offenders.append(f"{name} {fault}")
            elif module + PLAIN_SUFFIX in stored:
                offenders.append(f"{module} has packed weights and a plain weight")
            else:
                rows, half = gather.shape
                out[module + PLAIN_SUFFIX] = LogicalTensor("BF16", (rows, 2 * half), gather, scale)
    if offenders:
        raise BadQuantization(f"{where}: {len(offenders)} faults in its packed weights", offenders=offenders)
    return out


def _pair_fault(packed: Gather, scale: Gather | None) -> str | None:
    """Why two stored tensors are not the halves of one packed matrix, or None."""
    if scale is None:
        return f"has no {SCALE_SUFFIX[1:]} beside it"
    if len(packed.shape) != 2 or packed.shape[1] % 16 or packed.stored_dtype != "U8":
        return f"is {packed.stored_dtype} {list(packed.shape)}, wanted U8 [rows, whole blocks of 16 bytes]"
    wanted = (packed.shape[0], packed.shape[1] // 16)
    if scale.shape != wanted or scale.stored_dtype not in SCALE_DTYPES:
        return f"has scales {scale.stored_dtype} {list(scale.shape)}, wanted U8 {list(wanted)}"
    return None
