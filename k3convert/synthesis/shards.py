"""Shards as the release lays them out: one a decoder layer, then the rest of the text, the projector, the vision tower.

Inside a file tensors lie as the safetensors library writes them: larger element types first, then by name. So the
six tensors of an expert are neighbours, and experts follow each other as text (0, 1, 10, 100, 101, ...), not by id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from k3convert.checkpoint.safetensors_header import build_header
from k3convert.numerics.mxfp4_format import U8
from k3convert.synthesis.expert_blocks import expert_matrix
from k3convert.synthesis.plain_tensors import plain_pieces
from k3convert.synthesis.random_stream import random_stream
from k3model.census import DTYPE_BYTES, TensorSpec
from k3model.config import KimiK3Config

LAYER_COMPONENTS = ("trunk", "routed_experts")
TAIL_OF = {"embed": "text", "final_norm": "text", "lm_head": "text", "projector": "projector", "vision": "vision"}
PACKED, SCALE = ".weight_packed", ".weight_scale"
WRITE_BUFFER_BYTES = 1 << 20

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to be: its name, and its tensors in the order of the census."""

    name: str
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a checkpoint is."""

    num_shards: int
    total_bytes: int
    """Payload of all tensors."""


def measure(config: KimiK3Config) -> Extent:
    """Count the shards and bytes of a checkpoint."""
    places: set[int | str] = set()
    total_bytes = 0
    for spec in config.census():
        places.add(_place(spec))
        total_bytes += spec.num_bytes
    return Extent(len(places), total_bytes)


def shards(config: KimiK3Config, num_shards: int) -> Iterator[Shard]:
    """Every shard of a checkpoint, one at a time: of half a million specs only one file's are held."""
    for number, (_, specs) in enumerate(groupby(config.census(), key=_place), start=1):
        yield Shard(shard_name(number, num_shards), tuple(specs))


def shard_name(number: int, num_shards: int) -> str:
    """The released file name: the number in five digits, the count in six."""
    return f"model-{number:05d}-of-{num_shards:06d}.safetensors"


def write_shard(path: Path, shard: Shard, config: KimiK3Config, seed: int, *, sparse: bool, advance: Advance) -> int:
    """Write one file, or its header and a hole where the data would be; returns the file's bytes.

    ``advance`` hears of every piece's bytes.
    """
    specs = sorted(shard.specs, key=lambda spec: (-DTYPE_BYTES[spec.dtype], spec.name))
    header, entries = build_header(((spec.name, spec.dtype, spec.shapes[0]) for spec in specs), metadata=None)
    file_bytes = entries[-1].offset + entries[-1].nbytes
    with open(path, "xb", buffering=WRITE_BUFFER_BYTES) as file:
        file.write(header)
        if sparse:
            file.truncate(file_bytes)
            advance(file_bytes - len(header))
            return file_bytes
        for piece in _pieces(specs, config, seed):
            file.write(piece.data)
            advance(piece.nbytes)
    return file_bytes


def _place(spec: TensorSpec) -> int | str:
    """What tensors of one shard have in common."""
    if spec.component in LAYER_COMPONENTS:
        if spec.layer_index is None:
            raise ValueError(f"{spec.name} belongs to a layer and has no layer_index")
        return spec.layer_index
    return TAIL_OF[spec.component]


def _pieces(specs: Iterable[TensorSpec], config: KimiK3Config, seed: int) -> Iterator[NDArray[Any]]:
    for spec in specs:
        if spec.dtype == "U8":
            yield expert_part(spec, seed)
        else:
            yield from plain_pieces(spec, config, seed)


def expert_part(spec: TensorSpec, seed: int) -> U8:
    """The packed codes or the scales of one expert matrix."""
    rows, columns = spec.shapes[0]
    if spec.name.endswith(PACKED):
        return _expert_matrix(spec.name.removesuffix(PACKED), seed, rows, 2 * columns)[0]
    return _expert_matrix(spec.name.removesuffix(SCALE), seed, rows, 32 * columns)[1]


# Codes and scales depend on each other and lie next to each other in the file: one matrix is drawn once for both.
@lru_cache(maxsize=1)
def _expert_matrix(name: str, seed: int, out_features: int, in_features: int) -> tuple[U8, U8]:
    return expert_matrix(random_stream(seed, name), out_features, in_features)
