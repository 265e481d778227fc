"""Errors of the tensors of one kind judged together, because a few values say little about a ratio of errors."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from k3convert.parity import limits
from k3convert.parity.cells import Precision
from k3convert.parity.limits import Gate, Limit
from k3convert.parity.measure import Measure, half_ulp
from k3convert.parity.records import Entry, Kind
from k3convert.parity.tensor_errors import Errors

_ATTENTION = {"KdaAttention": "kda", "MlaAttention": "mla"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, order=True)
class PoolKey:
    """What the tensors of a pool have in common.

    Attributes:
        kind: see ``Kind``.
        layer_kind: ``kda``, ``mla`` or ``none``.
        path: name with every layer number replaced by ``{n}``.
    """

    kind: Kind
    layer_kind: str
    path: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A tensor, its pool and its figures.

    Attributes:
        entry: as the baseline has it.
        key: of its pool.
        measure: its figures.
        has_ratio: whether the golden tensor is more precise than the run: else its baseline's error means nothing.
    """

    entry: Entry
    key: PoolKey
    measure: Measure
    has_ratio: bool

    @property
    def scale(self) -> float:
        """What errors are divided by: the golden rms, or the baseline's error where that is zero.

        Zero where golden and baseline are zero: anything else is infinitely far away then.
        """
        return self.measure.golden_rms or self.measure.baseline.rms

    @property
    def floor(self) -> float:
        """The least relative error that a baseline counts with: that of one rounding."""
        return half_ulp(getattr(torch, self.entry.dtype))


@dataclass(frozen=True, slots=True)
class Totals:
    """Relative errors of one or several tensors.

    Attributes:
        num_values: how many were judged.
        candidate_rms: of the candidate's errors, each tensor's over the rms of its golden values.
        baseline_rms: of the baseline's, likewise; each tensor's at least half a unit in the last place.
        candidate_max: the largest.
        baseline_max: the largest, likewise at least half a unit.
        candidate_bias: the mean error, signed or outward, whichever is larger in units of its standard error.
        baseline_bias: likewise.
        num_non_finite: elements with a NaN or an infinity that the other run has not.
        has_ratio: whether every tensor has a golden one in a wider dtype.
    """

    num_values: int
    candidate_rms: float
    baseline_rms: float
    candidate_max: float
    baseline_max: float
    candidate_bias: float
    baseline_bias: float
    num_non_finite: int
    has_ratio: bool

    @property
    def rms_ratio(self) -> float:
        """Of the candidate's rms error to the baseline's."""
        return self.candidate_rms / self.baseline_rms if self.baseline_rms else 0.0

    @property
    def max_ratio(self) -> float:
        """Of the candidate's largest error to the baseline's."""
        return self.candidate_max / self.baseline_max if self.baseline_max else 0.0


@dataclass(frozen=True, slots=True)
class Pool:
    """The tensors of one kind, and how they stand against the limits."""

    key: PoolKey
    names: tuple[str, ...]
    totals: Totals
    gates: tuple[Gate, ...]

    @property
    def headroom(self) -> float:
        """The largest of measured over allowed."""
        return max((gate.headroom for gate in self.gates), default=0.0)

    @property
    def is_outside(self) -> bool:
        """Whether any limit is exceeded."""
        return any(gate.is_beyond for gate in self.gates)


def layer_kinds(entries: Iterable[Entry]) -> dict[int, str]:
    """``kda`` or ``mla`` by layer, from the classes of the modules that were recorded."""
    return {
        entry.layer: _ATTENTION[entry.module_type]
        for entry in entries
        if entry.layer is not None and entry.module_type in _ATTENTION
    }


def pool_key(entry: Entry, kinds: Mapping[int, str]) -> PoolKey:
    """The pool of a tensor."""
    layer_kind = "none" if entry.layer is None else kinds.get(entry.layer, "none")
    return PoolKey(entry.kind, layer_kind, _NUMBER.sub("{n}", entry.name))


def make_pools(tensors: Iterable[Measured], precision: Precision) -> tuple[Pool, ...]:
    """Judge tensors pool by pool, the worst first."""
    grouped: defaultdict[PoolKey, list[Measured]] = defaultdict(list)
    for tensor in tensors:
        grouped[tensor.key].append(tensor)
    pools = []
    for key, members in grouped.items():
        totals = sum_up(members)
        names = tuple(member.entry.name for member in members)
        gates = gates_of(totals, limits.ceiling(key.kind, key.path, precision))
        # the baseline's own bits use nothing of any limit
        is_bitwise = all(member.measure.is_bitwise for member in members)
        pools.append(Pool(key, names, totals, () if is_bitwise else gates))
    return tuple(sorted(pools, key=lambda pool: (-pool.headroom, pool.key)))


def gates_of(totals: Totals, ceiling: Limit, *, room: float = 1.0) -> tuple[Gate, ...]:
    """The limits that hold for some errors: ratios where there are values enough, else the ceiling.

    Args:
        totals: of the tensors.
        ceiling: of their kind and dtype.
        room: factor on the ratios' limits.
    """
    non_finite = Gate(limits.NON_FINITE.name, totals.num_non_finite, limits.NON_FINITE.value)
    if not totals.has_ratio:
        return (Gate(ceiling.name, totals.candidate_rms, ceiling.value), non_finite)
    if totals.num_values < limits.POOLED_VALUES.value:
        allowed = max(ceiling.value, limits.SMALL_RATIO.value * totals.baseline_rms)
        name = ceiling.name if allowed == ceiling.value else limits.SMALL_RATIO.name
        return (Gate(name, totals.candidate_rms, allowed), non_finite)
    ratios = (
        Gate(limits.RMS_RATIO.name, totals.rms_ratio, limits.RMS_RATIO.value * room),
        Gate(limits.MAX_RATIO.name, totals.max_ratio, limits.MAX_RATIO.value * room),
    )
    if _is_harmless(totals):
        return (*ratios, non_finite)
    bias = max(limits.BIAS.value, limits.RMS_RATIO.value * totals.baseline_bias)
    return (*ratios, Gate(limits.BIAS.name, totals.candidate_bias, bias * room), non_finite)


def sum_up(members: Sequence[Measured]) -> Totals:
    """Relative errors of tensors, each divided by the rms of its golden values."""
    num = sum(member.measure.num_judged for member in members)
    candidate = [_Relative.of(member.measure.candidate, member.scale, 0.0) for member in members]
    baseline = [_Relative.of(member.measure.baseline, member.scale, member.floor) for member in members]
    sizes = [member.measure.num_judged for member in members]
    candidate_rms, baseline_rms = _pooled_rms(candidate, sizes), _pooled_rms(baseline, sizes)
    largest_rms = max(candidate_rms, baseline_rms)
    return Totals(
        num_values=num,
        candidate_rms=candidate_rms,
        baseline_rms=baseline_rms,
        candidate_max=max((part.max_abs for part in candidate), default=0.0),
        baseline_max=max((part.max_abs for part in baseline), default=0.0),
        candidate_bias=_bias(candidate, sizes, largest_rms),
        baseline_bias=_bias(baseline, sizes, largest_rms),
        num_non_finite=sum(member.measure.difference.num_non_finite for member in members),
        has_ratio=all(member.has_ratio for member in members),
    )


@dataclass(frozen=True, slots=True)
class _Relative:
    """Errors of one tensor over its scale."""

    rms: float
    max_abs: float
    means: tuple[float, float]
    spreads: tuple[float, float]

    @staticmethod
    def of(errors: Errors, scale: float, floor: float) -> _Relative:
        figures = (
            errors.rms, errors.max_abs, errors.mean, errors.mean_outward, errors.mean_spread, errors.outward_spread,
        )  # fmt: skip
        if scale:
            rms, max_abs, mean, outward, *spreads = (figure / scale for figure in figures)
        else:
            rms, max_abs, mean, outward, *spreads = (math.copysign(math.inf, f) if f else 0.0 for f in figures)
        return _Relative(max(rms, floor), max(max_abs, floor), (mean, outward), (spreads[0], spreads[1]))


def _pooled_rms(parts: Sequence[_Relative], sizes: Sequence[int]) -> float:
    return math.sqrt(sum(part.rms**2 * size for part, size in zip(parts, sizes, strict=True)) / max(1, sum(sizes)))


def _bias(parts: Sequence[_Relative], sizes: Sequence[int], largest_rms: float) -> float:
    """The larger of the two means in units of its standard error.

    That is at least ``rms / sqrt(n)`` of no more than ``limits.BIAS_VALUES`` values and of the larger rms of the two
    runs: where one of them has hardly any error, its mean is no bias.
    """
    num = sum(sizes)
    if not largest_rms or math.isinf(largest_rms):
        return 0.0
    least = largest_rms / math.sqrt(min(num, limits.BIAS_VALUES))
    out = 0.0
    for which in (0, 1):
        mean = abs(sum(part.means[which] * size for part, size in zip(parts, sizes, strict=True))) / num
        spread = math.hypot(*(part.spreads[which] * size for part, size in zip(parts, sizes, strict=True))) / num
        out = max(out, mean / max(spread, least))
    return out


def _is_harmless(totals: Totals) -> bool:
    """Whether the candidate's errors are at most half of those a baseline counts with, whatever their mean."""
    return totals.candidate_rms <= totals.baseline_rms / limits.RMS_RATIO.value
