"""Whether two runs send tokens to the same experts, and whether noise explains it where they do not.

A choice is discrete: the smallest difference of two scores can send a token elsewhere, and everything behind it then
differs by far more than noise. So a flip is judged by the margin that the baseline's choice had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from k3convert.parity import limits
from k3convert.parity.measure import half_ulp
from k3convert.parity.records import Entry, Kind

SHOWN_FLIPS = 5


class Recorded(Protocol):
    """Tensors of a run by kind and name: a ``Run``, or what a capture has of one."""

    @property
    def entries(self) -> Mapping[tuple[Kind, str], Entry]:
        """What was recorded."""
        ...

    def tensor(self, kind: Kind, name: str) -> Tensor:
        """The global tensor, on the CPU, in its own dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Flip:
    """A token that goes to another set of experts.

    Attributes:
        row: of the batch.
        position: in the row.
        margin: of the baseline's choice: the lowest score that was chosen less the highest that was not.
        left: experts of the baseline alone.
        joined: experts of the candidate alone.
        is_beyond: whether noise does not explain it.
    """

    row: int
    position: int
    margin: float
    left: tuple[int, ...]
    joined: tuple[int, ...]
    is_beyond: bool


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """One router.

    Attributes:
        name: of the router.
        layer: of the text decoder.
        num_tokens: routed by it.
        num_flips: tokens with another set of experts.
        num_following: flips at or behind a token that an earlier layer sent elsewhere: they follow from that one, and
            are not judged.
        num_beyond: judged flips whose margin exceeds the bound.
        noise_bound: the largest margin that noise explains.
        smallest_margin: of the baseline, over all tokens.
        flips: the judged ones with the largest margins.
    """

    name: str
    layer: int | None
    num_tokens: int
    num_flips: int
    num_following: int
    num_beyond: int
    noise_bound: float
    smallest_margin: float
    flips: tuple[Flip, ...]


@dataclass(frozen=True, slots=True)
class RoutingAgreement:
    """All routers in order."""

    layers: tuple[LayerRouting, ...]

    @property
    def num_flips(self) -> int:
        """Tokens with another set of experts, over all layers."""
        return sum(layer.num_flips for layer in self.layers)

    @property
    def num_beyond(self) -> int:
        """Flips that noise does not explain."""
        return sum(layer.num_beyond for layer in self.layers)

    @property
    def first_beyond(self) -> LayerRouting | None:
        """The first router with such a flip."""
        return next((layer for layer in self.layers if layer.num_beyond), None)


def compare_routing(golden: Recorded, baseline: Recorded, candidate: Recorded) -> RoutingAgreement:
    """Compare the experts of every token and layer.

    The bound of a layer's margin is ``limits.FLIP_MARGIN`` times the baseline's largest error of a score, which counts
    with half a unit in the last place of the largest score at least.
    """
    reached: dict[int, int] = {}
    layers = []
    entries = [entry for entry in baseline.entries.values() if entry.kind is Kind.ROUTED_EXPERTS]
    for entry in sorted(entries, key=lambda entry: entry.order):
        key = (Kind.ROUTING_SCORES, entry.name)
        if (Kind.ROUTED_EXPERTS, entry.name) not in candidate.entries or key not in baseline.entries:
            continue
        scores = baseline.tensor(*key)
        bound = limits.FLIP_MARGIN.value * _score_error(scores, golden.tensor(*key) if key in golden.entries else None)
        layers.append(_layer(entry, scores, bound, baseline, candidate, reached))
    return RoutingAgreement(tuple(layers))


def _layer(
    entry: Entry, scores: Tensor, bound: float, baseline: Recorded, candidate: Recorded, reached: dict[int, int]
) -> LayerRouting:
    """Compare one router; ``reached`` has the first flipped position by row, of the layers before it."""
    own, other = (
        run.tensor(Kind.ROUTED_EXPERTS, entry.name).sort(dim=-1).values.flatten(0, -2) for run in (baseline, candidate)
    )
    tokens = entry.shape[-2] if len(entry.shape) > 2 else entry.shape[0]
    margins = _margins(scores.flatten(0, -2), own.shape[-1])
    changed = (own != other).any(dim=-1).nonzero().flatten().tolist()
    judged, first = [], dict(reached)
    for token in changed:
        row, position = divmod(token, tokens)
        first[row] = min(first.get(row, position), position)
        if position < reached.get(row, tokens):
            judged.append(token)
    reached.update(first)
    beyond = [token for token in judged if not float(margins[token]) <= bound]
    judged.sort(key=lambda token: -float(margins[token]))
    return LayerRouting(
        name=entry.name,
        layer=entry.layer,
        num_tokens=len(own),
        num_flips=len(changed),
        num_following=len(changed) - len(judged),
        num_beyond=len(beyond),
        noise_bound=bound,
        smallest_margin=float(margins.min()) if len(margins) else 0.0,
        flips=tuple(_flip(token, tokens, margins, own, other, bound) for token in judged[:SHOWN_FLIPS]),
    )


def _flip(token: int, tokens: int, margins: Tensor, own: Tensor, other: Tensor, bound: float) -> Flip:
    row, position = divmod(token, tokens)
    margin = float(margins[token])
    left, joined = _only(own[token], other[token]), _only(other[token], own[token])
    return Flip(row, position, margin, left, joined, is_beyond=not margin <= bound)


def _margins(scores: Tensor, num_chosen: int) -> Tensor:
    """Lowest chosen score less the highest other, a token each; infinite where every expert is chosen."""
    if num_chosen >= scores.shape[-1]:
        return torch.full((scores.shape[0],), torch.inf)
    best = scores.double().topk(num_chosen + 1, dim=-1).values
    return best[:, -2] - best[:, -1]


def _score_error(scores: Tensor, golden: Tensor | None) -> float:
    own = scores.double()
    finite = own.isfinite()
    floor = half_ulp(scores.dtype) * float(own[finite].abs().max()) if bool(finite.any()) else 0.0
    if golden is None:
        return floor
    finite &= golden.isfinite()
    return max(floor, float((own - golden.double())[finite].abs().max())) if bool(finite.any()) else floor


def _only(here: Tensor, there: Tensor) -> tuple[int, ...]:
    return tuple(sorted(set(here.tolist()) - set(there.tolist())))
