"""Whether a run proves that its set-up trains: one check a question, each with its figures. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import log
from statistics import median
from typing import Any

from k3convert.training.curves import Trend, end_level
from k3convert.training.metrics import StepMetrics
from k3convert.training.outcome import Outcome
from k3convert.training.recipe import Expectations, Recipe

MIN_TREND_STEPS = 4


class Result(StrEnum):
    """How a check went. Not run is never passed."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Check:
    """One question, its answer, and the figures behind it."""

    name: str
    result: Result
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """All checks of a run."""

    checks: tuple[Check, ...]

    @property
    def is_ok(self) -> bool:
        """Whether none failed."""
        return all(check.result is not Result.FAILED for check in self.checks)

    def document(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        checks = [{"name": check.name, "result": check.result.value, "detail": check.detail} for check in self.checks]
        return {"verdict": "ok" if self.is_ok else "not ok", "checks": checks}


def judge(recipe: Recipe, steps: Sequence[StepMetrics], outcome: Outcome) -> Verdict:
    """Judge a run by its steps and its end."""
    counted = [metrics for metrics in steps if metrics.num_labels and metrics.nonfinite is None]
    losses = [metrics.loss for metrics in counted]
    return Verdict(
        (
            _finite(steps),
            _first_loss(recipe.expect, outcome.vocab_size, losses, is_whole=bool(steps) and steps[0].step == 1),
            _falls(recipe.expect, losses),
            _gradient_norm(recipe.expect, counted),
            _memory(recipe.expect, outcome, steps),
            _resumes(outcome),
            *_kernels(outcome),
        )
    )


def _answer(is_passed: bool) -> Result:
    return Result.PASSED if is_passed else Result.FAILED


def _finite(steps: Sequence[StepMetrics]) -> Check:
    if not steps:
        return Check("finite", Result.NOT_RUN, "no step was done")
    for metrics in steps:
        if metrics.nonfinite is not None:
            return Check("finite", Result.FAILED, f"step {metrics.step}: {metrics.nonfinite}")
    return Check("finite", Result.PASSED, f"loss and gradients of {len(steps)} steps")


def _first_loss(expect: Expectations, vocab_size: int, losses: Sequence[float], *, is_whole: bool) -> Check:
    name, uniform = "first loss", log(vocab_size)
    if not losses or not is_whole:
        return Check(name, Result.NOT_RUN, "the first step is not part of this run")
    first = losses[0]
    low, high = expect.first_loss or (uniform - expect.first_loss_band, uniform + expect.first_loss_band)
    where = f"{first:.4f}, expected {low:.2f} to {high:.2f}; guessing among {vocab_size:,} tokens costs {uniform:.4f}"
    if low <= first <= high:
        return Check(name, Result.PASSED, where)
    if first > high:
        # Logits that are normal with deviation s and know nothing cost s * s / 2 more than equal ones.
        excess = max(0.0, first - uniform)
        why = f"{excess:.2f} above: as of logits that know nothing and deviate by {(2 * excess) ** 0.5:.2f}"
        why += "; the head's scale, the tokenizer or the labels do not belong to these weights"
    else:
        why = "the network knows these data already, or most labels are easy: a template, padding, or a leak"
    return Check(name, Result.FAILED, f"{where}; {why}")


def _falls(expect: Expectations, losses: Sequence[float]) -> Check:
    name = "loss falls"
    if len(losses) < MIN_TREND_STEPS:
        return Check(name, Result.NOT_RUN, f"{len(losses)} steps show no trend; {MIN_TREND_STEPS} are the fewest")
    fall = 1 - end_level(losses) / losses[0]
    trend = Trend.of(losses[len(losses) // 2 :])
    # A curve that reached its floor is flat; then the fall alone must show that it came down.
    is_down = trend.high < 0 or (expect.fall > 0 and fall >= expect.fall and trend.low < 0)
    detail = (
        f"{fall:.1%} of the first loss is gone (at least {expect.fall:.0%} expected); second half "
        f"{trend.slope:+.2e} a step ({trend.low:+.1e} to {trend.high:+.1e})"
    )
    return Check(name, _answer(is_down and fall >= expect.fall), detail)


def _gradient_norm(expect: Expectations, steps: Sequence[StepMetrics]) -> Check:
    name = "gradient norm"
    if not steps:
        return Check(name, Result.NOT_RUN, "no step counted a label")
    norms = [metrics.gradient_norm for metrics in steps]
    middle, largest = median(norms), max(norms[len(norms) // 2 :])
    silent = sorted(
        {name for metrics in steps for name, norm in metrics.group_norms.items() if norm == 0}
        - {name for metrics in steps for name, norm in metrics.group_norms.items() if norm > 0}
    )
    detail = f"median {middle:.3g}, largest of the second half {largest:.3g}"
    if silent:
        detail += f"; no gradient ever reached: {', '.join(silent)}"
    is_sane = 0 < largest <= expect.gradient_norm_ratio * middle
    return Check(name, _answer(is_sane), f"{detail} (at most {expect.gradient_norm_ratio:g} times the median)")


def _memory(expect: Expectations, outcome: Outcome, steps: Sequence[StepMetrics]) -> Check:
    if not steps:
        return Check("memory", Result.NOT_RUN, "no step was done")
    peak = max(metrics.allocated_bytes for metrics in steps)
    plan = outcome.planned_bytes + expect.activation_gib * 2**30
    detail = (
        f"{peak / 2**30:.2f} GiB at most; planned {plan / 2**30:.2f}: {outcome.planned_bytes / 2**30:.2f} of "
        f"parameters, gradients and moments, {expect.activation_gib:g} beyond"
    )
    return Check("memory", _answer(peak <= plan), detail)


def _resumes(outcome: Outcome) -> Check:
    found = outcome.resume_check
    if found is None:
        return Check("resume", Result.NOT_RUN, "nothing was saved (saving.every is 0), or the run was not finite")
    first, again = found.losses
    text = f"step {found.step} after resuming: loss {again!r}, without {first!r}"
    if not found.is_bitwise and first == again:
        text += "; parameters or moments differ"
    return Check("resume", _answer(found.is_bitwise), text + ("; every bit equal" if found.is_bitwise else ""))


def _kernels(outcome: Outcome) -> Iterator[Check]:
    """Asked for with ``--profile`` alone."""
    found = outcome.kernels
    if found is not None:
        detail = "; ".join(found.faults) or f"{len(found.ops)} implementations ran in step {found.step}, as chosen"
        yield Check("kernels", _answer(not found.faults), detail)
