"""The verdict on one run: every tensor of it beside the golden and the baseline run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from k3convert.parity import limits
from k3convert.parity.cells import Cell, Precision
from k3convert.parity.execution_order import in_order
from k3convert.parity.expectation import Expectation
from k3convert.parity.limits import Gate, Limit
from k3convert.parity.logit_agreement import LogitAgreement, compare_logits
from k3convert.parity.measure import Measure, measure, tensor_digest
from k3convert.parity.pooling import Measured, Pool, Totals, gates_of, layer_kinds, make_pools, pool_key, sum_up
from k3convert.parity.records import Entry, Kind, ReplicasDiffer, Run
from k3convert.parity.routing_agreement import Recorded, RoutingAgreement, compare_routing
from k3convert.reporting.to_text import count_text

_DTYPES = {Precision.FP64: torch.float64, Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


class Verdict(StrEnum):
    """What a comparison says."""

    BITWISE = "bitwise"
    WITHIN_TOLERANCE = "within tolerance"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Fault:
    """A tensor that cannot be compared as it should be, which makes the verdict ``different``."""

    kind: Kind
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One tensor of the candidate.

    Attributes:
        entry: as the baseline has it.
        measure: its figures.
        totals: its errors relative to its scale.
        gates: the limits that it is held to alone.
        is_required_bitwise: whether the cell's expectation names its kind.
        is_outside: whether it exceeds a limit, alone or as a part of a pool that does.
    """

    entry: Entry
    measure: Measure
    totals: Totals
    gates: tuple[Gate, ...]
    is_required_bitwise: bool
    is_outside: bool = False

    @property
    def headroom(self) -> float:
        """The largest of measured over allowed."""
        return max((gate.headroom for gate in self.gates), default=0.0)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that a run has one of, such as its loss."""

    kind: Kind
    golden: float
    baseline: float
    candidate: float


@dataclass(frozen=True, slots=True)
class CellComparison:
    """A candidate run beside golden and baseline.

    Attributes:
        cell: how the candidate ran.
        verdict: see ``Verdict``.
        expectation: what had to be equal bit by bit, and why.
        tensors: every compared tensor, in the order of execution.
        pools: the tensors by kind, the worst first.
        routing: of the runs without forced routing; empty where no router was recorded.
        logits: None where none were recorded.
        scalars: loss and gradient norm, where all three runs have them.
        faults: what could not be compared.
        first_outside: the first tensor in the order of execution that exceeds a limit, should be bitwise and is not, or
            has a fault.
        notes: what a reader should know and nobody has to mend.
    """

    cell: Cell
    verdict: Verdict
    expectation: Expectation
    tensors: tuple[TensorComparison, ...]
    pools: tuple[Pool, ...]
    routing: RoutingAgreement
    logits: LogitAgreement | None
    scalars: tuple[Scalar, ...]
    faults: tuple[Fault, ...]
    first_outside: Entry | None
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the verdict is one to be glad of."""
        return self.verdict is not Verdict.DIFFERENT

    @property
    def first_different(self) -> Entry | None:
        """The first tensor in the order of execution with other bits than the baseline's."""
        return next((tensor.entry for tensor in self.tensors if not tensor.measure.is_bitwise), None)

    @property
    def headroom(self) -> float:
        """The largest of measured over allowed, of pools, tensors and logits."""
        gates = [gate for pool in self.pools for gate in pool.gates]
        gates += [gate for tensor in self.tensors for gate in tensor.gates]
        gates += self.logits.gates if self.logits is not None else ()
        return max((gate.headroom for gate in gates), default=0.0)

    @property
    def num_bitwise(self) -> int:
        """Tensors with the baseline's bits."""
        return sum(tensor.measure.is_bitwise for tensor in self.tensors)

    def limits_used(self) -> tuple[Limit, ...]:
        """Every limit that was applied, with its origin."""
        names = {gate.limit for pool in self.pools for gate in pool.gates}
        names |= {gate.limit for tensor in self.tensors for gate in tensor.gates}
        names |= {gate.limit for gate in self.logits.gates} if self.logits is not None else set()
        names |= {limits.POOLED_VALUES.name, limits.ALONE.name} if limits.RMS_RATIO.name in names else set()
        names |= {limits.FLIP_MARGIN.name} if self.routing.layers else set()
        return tuple(limit for limit in limits.LIMITS if limit.name in names)

    def tensor(self, kind: Kind, name: str) -> TensorComparison:
        """The comparison of one tensor.

        Raises:
            KeyError: it was not compared.
        """
        for tensor in self.tensors:
            if tensor.entry.key == (kind, name):
                return tensor
        raise KeyError(f"{name} ({kind}) was not compared")


def compare(
    cell: Cell,
    golden: Run,
    baseline: Run,
    candidate: Run,
    expectation: Expectation,
    *,
    device: str | torch.device = "cpu",
    free_runs: tuple[Run, Run, Run] | None = None,
    known: dict[tuple[Kind, str], Measure] | None = None,
) -> CellComparison:
    """Compare a run with the eager one in the same dtype, both measured against the golden one.

    Args:
        cell: how the candidate ran.
        golden: eager in a wider dtype; where it is no wider, ceilings take the place of ratios.
        baseline: eager in the cell's dtype on one rank.
        candidate: the run to judge.
        expectation: kinds that must have the baseline's bits.
        device: where the arithmetic of the comparison runs; it needs float64.
        free_runs: golden, baseline and candidate without forced routing, for the agreement of routers, where the
            runs above have it; None: the runs above.
        known: measures of tensors with the baseline's bits, filled here and used for the next cell with the same
            golden and baseline, which then need not be read again.
    """
    return compare_recorded(
        cell, golden, baseline, candidate, expectation, device=device, free_runs=free_runs, known=known
    )


def compare_recorded(
    cell: Cell,
    golden: Recorded,
    baseline: Recorded,
    candidate: Recorded,
    expectation: Expectation,
    *,
    device: str | torch.device = "cpu",
    free_runs: tuple[Recorded, Recorded, Recorded] | None = None,
    digests: Mapping[tuple[Kind, str], tuple[str, str]] | None = None,
    known: dict[tuple[Kind, str], Measure] | None = None,
) -> CellComparison:
    """As ``compare``, of anything that has tensors.

    Args:
        cell: as there.
        golden: as there.
        baseline: as there.
        candidate: as there.
        expectation: as there.
        device: as there.
        free_runs: as there.
        digests: of the whole tensors of candidate and baseline, where what is recorded are samples of them.
        known: as there.
    """
    faults: list[Fault] = []
    notes: list[str] = []
    known = {} if known is None else known
    measured = list(_measured(cell.dtype, golden, baseline, candidate, device, digests or {}, known, faults, notes))
    pools = make_pools(measured, cell.dtype)
    outside_pools = {pool.key: pool for pool in pools if pool.is_outside}
    tensors = [_judged(tensor, cell.dtype, expectation, outside_pools.get(tensor.key)) for tensor in measured]
    routing = compare_routing(*(free_runs or (golden, baseline, candidate)))
    if Kind.ROUTED_EXPERTS in expectation.bitwise and routing.num_flips:
        first = next(layer for layer in routing.layers if layer.num_flips)
        reason = f"{count_text(first.num_flips, 'token')} to other experts"
        faults.append(Fault(Kind.ROUTED_EXPERTS, first.name, reason))
    elif routing.first_beyond is not None:
        first = routing.first_beyond
        reason = f"{count_text(first.num_beyond, 'token')} to other experts, by more than noise explains"
        faults.append(Fault(Kind.ROUTED_EXPERTS, first.name, reason))
    faulty = {(fault.kind, fault.name) for fault in faults}
    logits = _logits(golden, baseline, candidate, cell.dtype, device, faulty)
    notes += _cautions(pools, cell.dtype)
    is_different = faults or outside_pools or any(tensor.is_outside for tensor in tensors)
    if is_different or (logits is not None and logits.is_outside):
        verdict = Verdict.DIFFERENT
    elif all(tensor.measure.is_bitwise for tensor in tensors) and not routing.num_flips:
        verdict = Verdict.BITWISE
    else:
        verdict = Verdict.WITHIN_TOLERANCE
    return CellComparison(
        cell=cell,
        verdict=verdict,
        expectation=expectation,
        tensors=tuple(tensors),
        pools=pools,
        routing=routing,
        logits=logits,
        scalars=_scalars(golden, baseline, candidate, faulty),
        faults=tuple(faults),
        first_outside=_first_outside(tensors, faults, dict(candidate.entries) | dict(baseline.entries)),
        notes=tuple(notes),
    )


def _first_outside(
    tensors: Collection[TensorComparison], faults: Collection[Fault], entries: Mapping[tuple[Kind, str], Entry]
) -> Entry | None:
    keys = {tensor.entry.key for tensor in tensors if tensor.is_outside} | {(f.kind, f.name) for f in faults}
    return next((entry for entry in in_order(entries) if entry.key in keys), None)


def _measured(
    precision: Precision,
    golden: Recorded,
    baseline: Recorded,
    candidate: Recorded,
    device: str | torch.device,
    digests: Mapping[tuple[Kind, str], tuple[str, str]],
    known: dict[tuple[Kind, str], Measure],
    faults: list[Fault],
    notes: list[str],
) -> Iterator[Measured]:
    kinds = layer_kinds(baseline.entries.values())
    for entry in in_order(baseline.entries):
        if entry.kind is Kind.ROUTED_EXPERTS:
            continue
        reason = _cannot_compare(entry, golden, candidate)
        if reason is not None:
            if _is_zero_gradient(entry, baseline):
                notes.append(f"{entry.name}: no gradient, where the baseline's is zero")
            else:
                faults.append(Fault(entry.kind, entry.name, reason))
            continue
        try:
            own = candidate.tensor(*entry.key)
        except (ReplicasDiffer, ValueError) as error:
            faults.append(Fault(entry.kind, entry.name, str(error)))
            continue
        own_digest, baseline_digest = digests.get(entry.key) or (tensor_digest(own), None)
        figures = known.get(entry.key)
        if figures is None or figures.baseline_digest != own_digest:
            figures = measure(
                own, baseline.tensor(*entry.key), golden.tensor(*entry.key), device=device,
                candidate_digest=own_digest, baseline_digest=baseline_digest,
            )  # fmt: skip
        if figures.is_bitwise:
            known[entry.key] = figures
        golden_dtype: torch.dtype = getattr(torch, golden.entries[entry.key].dtype)
        has_ratio = torch.finfo(golden_dtype).eps < torch.finfo(_DTYPES[precision]).eps
        yield Measured(entry, pool_key(entry, kinds), figures, has_ratio)
    for entry in in_order({key: e for key, e in candidate.entries.items() if key not in baseline.entries}):
        if _is_zero_gradient(entry, candidate):
            notes.append(f"{entry.name}: a gradient of zero, where the baseline has none")
        else:
            faults.append(Fault(entry.kind, entry.name, "the baseline has no such tensor"))


def _cannot_compare(entry: Entry, golden: Recorded, candidate: Recorded) -> str | None:
    """Why a tensor of the baseline has no counterpart, or None."""
    own = candidate.entries.get(entry.key)
    if own is None:
        return "the candidate did not record it"
    if (own.shape, own.dtype) != (entry.shape, entry.dtype):
        return f"{own.dtype} {list(own.shape)}, and the baseline's is {entry.dtype} {list(entry.shape)}"
    wanted = golden.entries.get(entry.key)
    if wanted is None:
        return "the golden run did not record it"
    if wanted.shape != entry.shape:
        return f"{list(entry.shape)}, and the golden one is {list(wanted.shape)}"
    return None


def _is_zero_gradient(entry: Entry, run: Recorded) -> bool:
    """Whether this is a parameter's gradient of nothing but zeros, which is as good as none."""
    return entry.kind is Kind.PARAMETER_GRADIENT and not bool(run.tensor(entry.kind, entry.name).any())


def _judged(
    tensor: Measured, precision: Precision, expectation: Expectation, outside_pool: Pool | None
) -> TensorComparison:
    totals = sum_up([tensor])
    entry = tensor.entry
    is_required = entry.kind in expectation.bitwise
    gates: tuple[Gate, ...] = ()
    if not tensor.measure.is_bitwise and (totals.num_values >= limits.POOLED_VALUES.value or not totals.has_ratio):
        gates = gates_of(totals, limits.ceiling(entry.kind, entry.name, precision), room=limits.ALONE.value)
    if is_required:
        gates += (Gate(limits.BITWISE.name, float(not tensor.measure.is_bitwise), limits.BITWISE.value),)
    is_outside = any(gate.is_beyond for gate in gates)
    if outside_pool is not None and not is_outside and not tensor.measure.is_bitwise:
        is_outside = _exceeds(totals, outside_pool)
    return TensorComparison(entry, tensor.measure, totals, gates, is_required, is_outside)


def _exceeds(totals: Totals, pool: Pool) -> bool:
    """Whether a tensor is beyond a limit that its pool exceeds."""
    own = {
        limits.RMS_RATIO.name: totals.rms_ratio,
        limits.MAX_RATIO.name: totals.max_ratio,
        limits.BIAS.name: totals.candidate_bias,
        limits.NON_FINITE.name: float(totals.num_non_finite),
    }
    # a ceiling, and what stands in for one, bounds the rms error itself
    return any(gate.is_beyond and own.get(gate.limit, totals.candidate_rms) > gate.allowed for gate in pool.gates)


def _logits(
    golden: Recorded,
    baseline: Recorded,
    candidate: Recorded,
    precision: Precision,
    device: str | torch.device,
    faulty: Collection[tuple[Kind, str]],
) -> LogitAgreement | None:
    runs = (candidate, baseline, golden)
    key = (Kind.LOGITS, str(Kind.LOGITS))
    if key in faulty or not _all_have(runs, key):
        return None
    tensors = [run.tensor(*key) for run in runs]
    loss_key = (Kind.TOKEN_LOSS, str(Kind.TOKEN_LOSS))
    losses = None
    if loss_key not in faulty and _all_have(runs, loss_key):
        own, base, want = (run.tensor(*loss_key) for run in runs)
        losses = (own, base, want)
    return compare_logits(tensors[0], tensors[1], tensors[2], precision, losses=losses, device=device)


def _scalars(
    golden: Recorded, baseline: Recorded, candidate: Recorded, faulty: Collection[tuple[Kind, str]]
) -> tuple[Scalar, ...]:
    keys = [(kind, str(kind)) for kind in (Kind.LOSS, Kind.GRADIENT_NORM)]
    runs = (golden, baseline, candidate)
    usable = [key for key in keys if key not in faulty and _all_have(runs, key)]
    return tuple(Scalar(key[0], *(float(run.tensor(*key)) for run in runs)) for key in usable)


def _all_have(runs: Collection[Recorded], key: tuple[Kind, str]) -> bool:
    shapes = {run.entries[key].shape if key in run.entries else None for run in runs}
    return None not in shapes and len(shapes) == 1


def _cautions(pools: Collection[Pool], precision: Precision) -> list[str]:
    """Pools whose baseline is itself far from the golden run: passing beside it says little."""
    found = []
    for pool in pools:
        ceiling = limits.ceiling(pool.key.kind, pool.key.path, precision)
        if pool.totals.has_ratio and pool.totals.baseline_rms > limits.SMALL_RATIO.value * ceiling.value:
            found.append(pool)
    if not found:
        return []
    worst = max(found, key=lambda pool: pool.totals.baseline_rms)
    return [
        f"the baseline itself is far from the golden run in {len(found)} of {len(pools)} pools; most in "
        f"{worst.key.path} ({worst.key.kind}): {worst.totals.baseline_rms:.2g} of the golden rms"
    ]
