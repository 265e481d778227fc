"""Named tensors of one run, as its ranks wrote them, put together again as global tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


class Kind(StrEnum):
    """What a recorded tensor is."""

    INPUT = "input"
    INPUT_GRADIENT = "input_gradient"
    OUTPUT = "output"
    OUTPUT_GRADIENT = "output_gradient"
    PARAMETER_GRADIENT = "parameter_gradient"
    LOGITS = "logits"
    TOKEN_LOSS = "token_loss"
    LOSS = "loss"
    GRADIENT_NORM = "gradient_norm"
    ROUTED_EXPERTS = "routed_experts"
    ROUTING_SCORES = "routing_scores"


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a tensor beside its values.

    Attributes:
        kind: see ``Kind``.
        name: FQN of the module or parameter; the kind itself where there is one a run.
        order: place in the order in which this kind was made; a backward pass runs against the forward's.
        module_type: class of the module that made it or owns it; empty where none does.
        layer: text decoder layer, 0-based; None outside of them.
        impl: ``op/variant/impl`` of the ops that the module holds, joined by ``+``; empty for none.
        dtype: torch's name without ``torch.``.
        shape: of the global tensor.
    """

    kind: Kind
    name: str
    order: int
    module_type: str
    layer: int | None
    impl: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def key(self) -> tuple[Kind, str]:
        """What names the tensor in a run."""
        return self.kind, self.name


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rank's part of a global tensor.

    Attributes:
        start: of the part in each dim.
        shape: of the part.
        is_partial: whether ranks hold terms of the same elements, which are summed; otherwise they hold copies.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    is_partial: bool = False


class ReplicasDiffer(ValueError):
    """Ranks that hold copies of the same part of a tensor hold different values."""


class RankRecords:
    """What one rank records of a run, in memory until ``save``."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._rows: list[dict[str, Any]] = []

    def add(self, entry: Entry, value: Tensor, start: Sequence[int] | None = None, *, is_partial: bool = False) -> None:
        """Keep a copy of this rank's part of a tensor; ``start`` is zeros where the part is the whole."""
        chunk = Chunk(tuple(start) if start is not None else (0,) * value.dim(), tuple(value.shape), is_partial)
        key = str(len(self._rows))
        self._tensors[key] = value.detach().to("cpu", copy=True).contiguous()
        self._rows.append({"entry": asdict(entry), "chunk": asdict(chunk), "key": key})

    def differing(self, other: RankRecords) -> set[str]:
        """Names whose tensors have other bits in the other records, or are in one of the two alone."""
        here, there = self._by_name(), other._by_name()
        names = {name for name, _ in here.keys() ^ there.keys()}
        return names | {key[0] for key in here.keys() & there.keys() if not _same_bits(here[key], there[key])}

    def _by_name(self) -> dict[tuple[str, str], Tensor]:
        """By kind and name, and by place; one name may have several chunks."""
        return {
            (f"{row['entry']['name']} ({row['entry']['kind']})", str(row["chunk"])): self._tensors[row["key"]]
            for row in self._rows
        }

    def save(self, folder: Path, rank: int) -> None:
        """Write ``rankN.safetensors`` and, after it, ``rankN.json``."""
        save_file(self._tensors, folder / f"rank{rank}.safetensors")
        (folder / f"rank{rank}.json").write_text(json.dumps(self._rows))


class Run:
    """All tensors of one run.

    Args:
        folder: where the ranks of the run saved their records.
        without: ends of names that are left out.
        without_kinds: kinds that are left out.
    """

    def __init__(
        self, folder: Path, without: tuple[str, ...] = (), without_kinds: frozenset[Kind] = frozenset()
    ) -> None:
        self.folder = folder
        self.entries: dict[tuple[Kind, str], Entry] = {}
        self._parts: dict[tuple[Kind, str], list[tuple[str, str, Chunk]]] = {}
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("rank*.json")):
            for row in json.loads(path.read_text()):
                fields, chunk = row["entry"], row["chunk"]
                entry = Entry(**(fields | {"kind": Kind(fields["kind"]), "shape": tuple(fields["shape"])}))
                if entry.kind in without_kinds or (without and entry.name.endswith(without)):
                    continue
                part = (path.stem, row["key"], Chunk(tuple(chunk["start"]), tuple(chunk["shape"]), chunk["is_partial"]))
                self.entries.setdefault(entry.key, entry)
                self._parts.setdefault(entry.key, []).append(part)

    def of_kind(self, kind: Kind) -> Iterator[Entry]:
        """Entries of a kind in the order in which they were made."""
        return iter(sorted((entry for entry in self.entries.values() if entry.kind is kind), key=lambda e: e.order))

    def tensor(self, kind: Kind, name: str) -> Tensor:
        """The global tensor, on the CPU, in its own dtype.

        Raises:
            KeyError: the run recorded no such tensor.
            ValueError: the parts do not cover it.
            ReplicasDiffer: two ranks hold different copies of a part; the message says how many elements differ.
        """
        entry = self.entries[kind, name]
        boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        for stem, key, chunk in self._parts[kind, name]:
            if 0 in chunk.shape and 0 not in entry.shape:
                continue  # a rank that has nothing of it
            part, box = self._file(stem).get_tensor(key), (chunk.start, chunk.shape)
            if box not in boxes:
                boxes[box] = part
            elif chunk.is_partial:
                boxes[box] = boxes[box] + part  # in rank order
            elif not _same_bits(boxes[box], part):
                num_differing = int((_bits(boxes[box]) != _bits(part)).sum())
                raise ReplicasDiffer(f"{name} ({kind}): {num_differing} elements of {stem}'s copy differ")
        return _joined(boxes, entry)

    def _file(self, stem: str) -> Any:
        """A rank's file, opened once: its header names a thousand tensors."""
        if stem not in self._files:
            self._files[stem] = safe_open(self.folder / f"{stem}.safetensors", framework="pt")
        return self._files[stem]


def _joined(boxes: Mapping[tuple[tuple[int, ...], tuple[int, ...]], Tensor], entry: Entry) -> Tensor:
    """One tensor of parts that cover it, none of it twice."""
    if len(boxes) == 1 and next(iter(boxes))[1] == entry.shape:
        return next(iter(boxes.values()))
    num_covered = sum(prod(shape) for _, shape in boxes)
    if num_covered != prod(entry.shape) or _overlap(list(boxes)):
        raise ValueError(f"{entry.name} ({entry.kind}): {len(boxes)} parts hold {num_covered} of {prod(entry.shape)}")
    out = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    for (start, shape), part in boxes.items():
        out[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))] = part
    return out


def _overlap(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    return any(
        all(a < b + m and b < a + n for a, n, b, m in zip(start, shape, other, size, strict=True))
        for (start, shape), (other, size) in combinations(boxes, 2)
    )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
