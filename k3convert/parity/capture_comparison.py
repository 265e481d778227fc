"""A capture of another machine beside the references of this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from k3convert.parity import limits
from k3convert.parity.capture import Capture, Identity, check_identity, moments_of
from k3convert.parity.cells import parse_cell
from k3convert.parity.comparison import CellComparison, Fault, Verdict, compare_recorded
from k3convert.parity.execution_order import in_order
from k3convert.parity.expectation import Expectation
from k3convert.parity.measure import half_ulp, measure, tensor_digest
from k3convert.parity.records import Entry, Kind, Run
from k3convert.parity.routing_agreement import Recorded
from k3convert.parity.sampling import RoutedRun, SampledRun, sampled_shape


def compare_with_capture(
    golden: Run,
    baseline: Run,
    capture: Capture,
    expected: Identity,
    expectation: Expectation,
    *,
    device: str | torch.device = "cpu",
) -> CellComparison:
    """Judge a run of another machine by what was captured of it.

    Equality of bits is that of digests, so it is of whole tensors. Ratios are those of the samples, in candidate and
    baseline alike. What the samples miss shows in the moments: mean, rms and largest value can differ from the
    baseline's by no more than the errors that both may have.

    Args:
        golden: of this machine.
        baseline: of this machine, in the capture's dtype and data.
        capture: of the candidate.
        expected: what this machine's runs are of.
        expectation: what must be equal bit by bit; usually nothing between two machines.
        device: where the arithmetic of the comparison runs.

    Raises:
        CaptureMismatch: the capture is of other weights, inputs or options.
    """
    check_identity(capture, expected)
    digests = {
        key: (capture.digests[key], tensor_digest(baseline.tensor(*key)))
        for key in capture.entries if key in baseline.entries
    }  # fmt: skip
    found = compare_recorded(
        parse_cell(capture.identity.cell), SampledRun(golden), SampledRun(baseline), capture, expectation,
        device=device, free_runs=(RoutedRun(golden), RoutedRun(baseline), _Routers(capture)), digests=digests,
    )  # fmt: skip
    faults = tuple(_moment_faults(golden, baseline, capture, device))
    if not faults:
        return found
    keys = {(fault.kind, fault.name) for fault in faults}
    keys |= {found.first_outside.key} if found.first_outside is not None else set()
    first = next(entry for entry in in_order(baseline.entries) if entry.key in keys)
    return replace(found, verdict=Verdict.DIFFERENT, faults=(*found.faults, *faults), first_outside=first)


class _Routers:
    """The routers of a capture, which are cut already."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.entries: dict[tuple[Kind, str], Entry] = {
            key: replace(entry, shape=sampled_shape(entry))
            for key, entry in capture.entries.items() if entry.kind is Kind.ROUTED_EXPERTS
        }  # fmt: skip

    def tensor(self, kind: Kind, name: str) -> torch.Tensor:
        """Experts of the tokens that were kept."""
        return self._capture.tensor(kind, name)


def _moment_faults(
    golden: Recorded, baseline: Recorded, capture: Capture, device: str | torch.device
) -> Iterator[Fault]:
    """Tensors of which only some values were kept, and whose moments no permitted error explains."""
    for key, own in capture.moments.items():
        entry = capture.entries[key]
        is_comparable = key in baseline.entries and key in golden.entries and baseline.entries[key].shape == entry.shape
        if not is_comparable or sampled_shape(entry) == entry.shape or len(entry.shape) < 1:
            continue
        tensor = baseline.tensor(*key)
        base = moments_of(tensor)
        if (own.num_nan, own.num_infinite) != (base.num_nan, base.num_infinite):
            reason = f"{own.num_nan} NaN and {own.num_infinite} infinities, and the baseline has {base.num_nan} and "
            yield Fault(entry.kind, entry.name, reason + str(base.num_infinite))
            continue
        figures = measure(tensor, tensor, golden.tensor(*key), device=device, candidate_digest="-", baseline_digest="-")
        floor = half_ulp(tensor.dtype) * figures.golden_rms
        # by the triangle inequality, with an error that may be as much larger as the ratios allow
        room = (1 + limits.ALONE.value * limits.RMS_RATIO.value) * max(figures.baseline.rms, floor)
        most = (1 + limits.ALONE.value * limits.MAX_RATIO.value) * max(figures.baseline.max_abs, floor)
        for name, allowed in (("mean", room), ("rms", room), ("abs_max", most)):
            here, there = getattr(base, name), getattr(own, name)
            if not abs(here - there) <= allowed:
                reason = (
                    f"{name} of all values is {there:.6g}, the baseline's is {here:.6g}: errors explain {allowed:.3g}"
                )
                yield Fault(entry.kind, entry.name, reason)
                break
