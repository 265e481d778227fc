"""Runs of an imaginary network: every tensor is a golden one plus noise of a chosen size, on as many ranks as asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3convert.parity.records import Entry, Kind, RankRecords, Run

LAYERS = ("KdaAttention", "KdaAttention", "KdaAttention", "MlaAttention")
ROWS, TOKENS, HIDDEN, HEADS, EXPERTS, TOP, VOCABULARY = 2, 32, 24, 6, 8, 2, 40
PREFIX = "language_model.model.layers"


def _entries(layers: Sequence[str]) -> Iterator[Entry]:
    """What a step of the imaginary network records."""
    hidden, order = (ROWS, TOKENS, HIDDEN), iter(range(10_000))
    backward = iter(range(10_000, 0, -1))

    def module(name: str, kind: str, layer: int | None, impl: str = "") -> Iterator[Entry]:
        yield Entry(Kind.OUTPUT, name, next(order), kind, layer, impl, "", hidden)
        yield Entry(Kind.OUTPUT_GRADIENT, name, next(backward), kind, layer, impl, "", hidden)

    parameter = iter(range(10_000))
    for layer, attention in enumerate(layers):
        base = f"{PREFIX}.{layer}"
        yield from module(f"{base}.self_attn.q_proj", "Linear", layer)
        yield Entry(
            Kind.PARAMETER_GRADIENT, f"{base}.self_attn.q_proj.weight", next(parameter), "Linear", layer, "", "",
            (HIDDEN, HIDDEN),
        )  # fmt: skip
        yield Entry(
            Kind.PARAMETER_GRADIENT, f"{base}.self_attn.decay.A_log", next(parameter), "DecayGate", layer, "", "",
            (HEADS,),
        )  # fmt: skip
        yield from module(f"{base}.self_attn", attention, layer, "kda/chunk/eager")
        gate = f"{base}.block_sparse_moe.gate"
        for kind, shape in ((Kind.ROUTING_SCORES, (ROWS, TOKENS, EXPERTS)), (Kind.ROUTED_EXPERTS, (ROWS, TOKENS, TOP))):
            yield Entry(kind, gate, next(order), "Router", layer, "", "", shape)
        yield from module(base, "DecoderLayer", layer)
    yield Entry(Kind.LOGITS, "logits", 0, "", None, "", "", (ROWS, TOKENS, VOCABULARY))
    yield Entry(Kind.TOKEN_LOSS, "token_loss", 0, "", None, "", "", (ROWS, TOKENS))
    yield Entry(Kind.LOSS, "loss", 0, "", None, "", "", ())
    yield Entry(Kind.GRADIENT_NORM, "gradient_norm", 0, "", None, "", "", ())


@cache
def entries_of(layers: Sequence[str]) -> tuple[Entry, ...]:
    return tuple(_entries(layers))


Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Wanted:
    """An imaginary run.

    Attributes:
        dtype: of its tensors.
        noise: relative size of the errors.
        seed: of the errors.
        ranks: rows are spread over them.
        changes: what is done to a tensor after that.
        without: tensors that are not recorded.
        layers: classes of the attention modules.
    """

    dtype: torch.dtype = torch.float32
    noise: float = 0.0
    seed: int = 0
    ranks: int = 1
    changes: dict[tuple[Kind, str], Change] = field(default_factory=dict)
    without: frozenset[tuple[Kind, str]] = frozenset()
    layers: tuple[str, ...] = LAYERS


def golden_value(entry: Entry, place: int) -> Tensor:
    """float64, from the place alone; tensors differ in scale by orders of magnitude."""
    generator = torch.Generator().manual_seed(place)
    value = torch.randn(entry.shape, generator=generator, dtype=torch.float64)
    return value if entry.kind in (Kind.ROUTING_SCORES, Kind.LOGITS) else value * 10.0 ** (place % 5 - 2)


def value_of(entry: Entry, wanted: Wanted) -> Tensor:
    """A tensor of an imaginary run."""
    entries = entries_of(wanted.layers)
    place = entries.index(entry)
    if entry.kind is Kind.ROUTED_EXPERTS:
        scores = next(e for e in entries if e.key == (Kind.ROUTING_SCORES, entry.name))
        value = value_of(scores, wanted).topk(TOP, dim=-1).indices.sort(dim=-1).values
    else:
        golden = golden_value(entry, place)
        generator = torch.Generator().manual_seed(1000 * (wanted.seed + 1) + place)
        noise = torch.randn(entry.shape, generator=generator, dtype=torch.float64)
        value = (golden + wanted.noise * noise * golden.square().mean().sqrt()).to(wanted.dtype)
    return wanted.changes.get(entry.key, lambda v: v)(value)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Write an imaginary run as its ranks would, and open it."""

    def make(**wishes: object) -> Run:
        wanted = Wanted(**wishes)  # type: ignore[arg-type]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        records = [RankRecords() for _ in range(wanted.ranks)]
        for entry in entries_of(wanted.layers):
            if entry.key in wanted.without:
                continue
            value = value_of(entry, wanted)
            full = Entry(
                entry.kind, entry.name, entry.order, entry.module_type, entry.layer, entry.impl,
                str(value.dtype).removeprefix("torch."), tuple(value.shape),
            )  # fmt: skip
            if value.dim() == 0 or value.shape[0] < wanted.ranks:
                for rank_records in records:
                    rank_records.add(full, value)
                continue
            start = 0
            for rank_records, part in zip(records, value.tensor_split(wanted.ranks), strict=True):
                rank_records.add(full, part, (start, *(0,) * (value.dim() - 1)))
                start += part.shape[0]
        for rank, rank_records in enumerate(records):
            rank_records.save(folder, rank)
        return Run(folder)

    return make
