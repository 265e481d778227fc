"""Outcomes of a session as a report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Literal

import torch

from k3convert.numerics import digest
from k3convert.parity import limits
from k3convert.parity.comparison import CellComparison, TensorComparison
from k3convert.parity.divergence import Divergence
from k3convert.parity.divergence_place import place_of, ulps_between
from k3convert.parity.execution_order import BACKWARD
from k3convert.parity.limits import Gate
from k3convert.parity.logit_agreement import LogitAgreement
from k3convert.parity.measure import ULP_CLASSES
from k3convert.parity.outcome import CellOutcome
from k3convert.parity.pooling import Pool
from k3convert.parity.records import Entry
from k3convert.parity.report import document as d
from k3convert.parity.report.environment import environment_of
from k3convert.version import __version__
from k3model.config import KimiK3Config

# Tensors of a cell that a report lists one by one; the others are in their pools.
LISTED_TENSORS = 40
OTHER_LAYERS = "other"
Direction = Literal["forward", "backward"]


def build_report(
    outcomes: Iterable[CellOutcome],
    session: d.SessionDocument,
    config: KimiK3Config,
    *,
    listed_tensors: int = LISTED_TENSORS,
) -> d.ParityReport:
    """Put a report together.

    Args:
        outcomes: of all cells, in the order in which they are to be listed.
        session: what the cells shared.
        config: of the network, for places in words.
        listed_tensors: how many tensors of a cell are listed one by one, the worst first.
    """
    outcomes = tuple(outcomes)
    counts = Counter(str(outcome.status) for outcome in outcomes)
    used = {limit for o in outcomes if o.comparison is not None for limit in o.comparison.limits_used()}
    return d.ParityReport(
        schema_version=d.SCHEMA_VERSION,
        tool=f"k3convert {__version__}",
        passed=counts["passed"] > 0 and counts["passed"] + counts["not run"] == len(outcomes),
        counts=dict(sorted(counts.items())),
        session=session,
        environment=environment_of(session.device),
        ulp_classes=ULP_CLASSES,
        limits=tuple(d.LimitDocument(**asdict(limit)) for limit in limits.LIMITS if limit in used),
        cells=tuple(_cell(outcome, config, listed_tensors) for outcome in outcomes),
    )


def _cell(outcome: CellOutcome, config: KimiK3Config, listed: int) -> d.CellDocument:
    comparison, divergence = outcome.comparison, outcome.divergence
    return d.CellDocument(
        cell=str(outcome.cell),
        status=str(outcome.status),  # type: ignore[arg-type]  # the values of the enumeration are the literals
        reason=outcome.reason,
        error=None if outcome.error is None else outcome.error.document(),
        elapsed_s=outcome.elapsed_s,
        step_s=outcome.step_s,
        baseline_step_s=outcome.baseline_step_s,
        peak_bytes=outcome.peak_bytes,
        flags=dict(outcome.flags),
        unsteady=outcome.unsteady,
        comparison=None if comparison is None else comparison_document(comparison, config, listed_tensors=listed),
        divergence=None if divergence is None else _divergence(divergence, config),
    )


def comparison_document(
    comparison: CellComparison, config: KimiK3Config, *, listed_tensors: int = LISTED_TENSORS
) -> d.ComparisonDocument:
    """A comparison as a document; the worst tensors are listed one by one, those that are outside before all."""
    worst = sorted(comparison.tensors, key=lambda tensor: (not tensor.is_outside, -tensor.headroom))
    different = [tensor for tensor in worst if tensor.is_outside or not tensor.measure.is_bitwise]
    return d.ComparisonDocument(
        verdict=str(comparison.verdict),
        headroom=comparison.headroom,
        num_tensors=len(comparison.tensors),
        num_bitwise=comparison.num_bitwise,
        bitwise_kinds=tuple(sorted(comparison.expectation.bitwise)),
        bitwise_reason=comparison.expectation.reason,
        first_outside=_name(comparison.first_outside),
        first_different=_name(comparison.first_different),
        layer_headroom=_layer_headroom(comparison.tensors),
        ulp_counts=_ulp_counts(comparison.tensors),
        digests=_digests(comparison.tensors),
        pools=tuple(_pool(pool) for pool in comparison.pools),
        tensors=tuple(_tensor(tensor, config) for tensor in different[:listed_tensors]),
        routing=tuple(d.RoutingDocument(**asdict(layer)) for layer in comparison.routing.layers),
        logits=None if comparison.logits is None else _logits(comparison.logits),
        scalars=tuple(d.ScalarDocument(**asdict(scalar)) for scalar in comparison.scalars),
        faults=tuple(d.FaultDocument(**asdict(fault)) for fault in comparison.faults),
        notes=comparison.notes,
    )


def _layer_headroom(tensors: Sequence[TensorComparison]) -> dict[Direction, dict[str, float]]:
    """The largest by direction and layer, in order; tensors outside of the text decoder's layers last."""
    found: dict[Direction, dict[str, float]] = {"forward": {}, "backward": {}}
    for tensor in sorted(tensors, key=lambda t: (t.entry.layer is None, t.entry.layer or 0)):
        by_layer = found["backward" if tensor.entry.kind in BACKWARD else "forward"]
        layer = OTHER_LAYERS if tensor.entry.layer is None else str(tensor.entry.layer)
        by_layer[layer] = max(by_layer.get(layer, 0.0), tensor.headroom)
    return found


def _ulp_counts(tensors: Sequence[TensorComparison]) -> dict[str, tuple[int, ...]]:
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(ULP_CLASSES))
    for tensor in tensors:
        sums = counts[str(tensor.entry.kind)]
        for place, count in enumerate(tensor.measure.difference.ulp_counts):
            sums[place] += count
    return {kind: tuple(sums) for kind, sums in sorted(counts.items())}


def _digests(tensors: Sequence[TensorComparison]) -> dict[str, str]:
    by_kind: defaultdict[str, list[str]] = defaultdict(list)
    for tensor in tensors:
        by_kind[str(tensor.entry.kind)].append(tensor.measure.candidate_digest)
    return {kind: digest.stack_digest(parts) for kind, parts in sorted(by_kind.items())}


def _tensor(tensor: TensorComparison, config: KimiK3Config) -> d.TensorDocument:
    figures, at = tensor.measure, tensor.measure.difference.at
    is_whole = figures.num_values == torch.Size(tensor.entry.shape).numel()
    return d.TensorDocument(
        tensor=_name_of(tensor.entry),
        is_bitwise=figures.is_bitwise,
        is_required_bitwise=tensor.is_required_bitwise,
        is_outside=tensor.is_outside,
        headroom=tensor.headroom,
        gates=_gates(tensor.gates),
        num_values=figures.num_values,
        num_judged=figures.num_judged,
        golden_rms=figures.golden_rms,
        candidate=d.ErrorsDocument(**asdict(figures.candidate)),
        baseline=d.ErrorsDocument(**asdict(figures.baseline)),
        difference=d.DifferenceDocument(**asdict(figures.difference)),
        candidate_digest=figures.candidate_digest,
        baseline_digest=figures.baseline_digest,
        place=place_of(tensor.entry, at, config).where if at is not None and is_whole else None,
    )


def _pool(pool: Pool) -> d.PoolDocument:
    totals = pool.totals
    return d.PoolDocument(
        kind=str(pool.key.kind),
        layer_kind=pool.key.layer_kind,
        path=pool.key.path,
        num_tensors=len(pool.names),
        num_values=totals.num_values,
        candidate_rms=totals.candidate_rms,
        baseline_rms=totals.baseline_rms,
        rms_ratio=totals.rms_ratio,
        max_ratio=totals.max_ratio,
        candidate_bias=totals.candidate_bias,
        baseline_bias=totals.baseline_bias,
        headroom=pool.headroom,
        is_outside=pool.is_outside,
        gates=_gates(pool.gates),
    )


def _logits(logits: LogitAgreement) -> d.LogitsDocument:
    return d.LogitsDocument(
        num_tokens=logits.num_tokens,
        candidate=d.PredictionsDocument(**asdict(logits.candidate)),
        baseline=d.PredictionsDocument(**asdict(logits.baseline)),
        gates=_gates(logits.gates),
    )


def _divergence(divergence: Divergence, config: KimiK3Config) -> d.DivergenceDocument:
    return d.DivergenceDocument(
        first=_name_of(divergence.first),
        module=divergence.module,
        origin=str(divergence.origin),
        differences=tuple(
            d.IsolatedDocument(
                tensor=_name_of(found.entry),
                place=str(place_of(found.entry, found.index, config)),
                candidate_value=found.candidate,
                baseline_value=found.reference,
                ulps=_ulps(found.candidate, found.reference, found.entry),
                num_different=found.num_differing,
                num_values=found.num_elements,
            )
            for found in divergence.differences
        ),
    )


def _ulps(candidate: float, reference: float, entry: Entry) -> int | None:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return ulps_between(candidate, reference, dtype) if dtype.is_floating_point else None


def _gates(gates: Iterable[Gate]) -> tuple[d.GateDocument, ...]:
    return tuple(
        d.GateDocument(limit=gate.limit, measured=gate.measured, allowed=gate.allowed, headroom=gate.headroom)
        for gate in gates
    )


def _name(entry: Entry | None) -> d.TensorName | None:
    return None if entry is None else _name_of(entry)


def _name_of(entry: Entry) -> d.TensorName:
    return d.TensorName(
        kind=str(entry.kind), name=entry.name, layer=entry.layer, module_type=entry.module_type, impl=entry.impl,
        dtype=entry.dtype, shape=entry.shape,
    )  # fmt: skip
