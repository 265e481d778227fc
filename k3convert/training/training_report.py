"""``report.html`` of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from k3convert.reporting.html_page import (
    Facts,
    HeatMap,
    LineChart,
    Mark,
    Page,
    Preformatted,
    Section,
    Series,
    Status,
    Table,
    write_page,
)
from k3convert.reporting.page_blocks import Block, Value
from k3convert.training.metrics import Speed, StepMetrics
from k3convert.training.outcome import KernelReport, Outcome
from k3convert.training.recipe import Recipe
from k3convert.training.recipe_reading import recipe_yaml
from k3convert.training.verdict import Check, Result, Verdict
from k3kernels.selection import EAGER

_STATUS = {Result.PASSED: Status.GOOD, Result.FAILED: Status.BAD, Result.NOT_RUN: Status.NEUTRAL}
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of a report."""

    name: str
    recipe: Recipe
    steps: tuple[StepMetrics, ...]
    outcome: Outcome
    verdict: Verdict
    speed: Speed

    def named_checks(self, *, several: bool) -> list[Check]:
        """The run's checks; under the run's name where there are several runs."""
        if not several:
            return list(self.verdict.checks)
        return [replace(check, name=f"{self.name}: {check.name}") for check in self.verdict.checks]

    def document(self) -> dict[str, Any]:
        """The run's figures as a JSON object."""
        last = self.steps[-1]
        return {
            "name": self.name,
            "num_steps": len(self.steps),
            "resumed_from": self.outcome.resumed_from,
            "first_loss": self.steps[0].loss,
            "last_loss": last.loss,
            "tokens_per_s": self.speed.tokens_per_s,
            "step_p50_s": self.speed.p50_s,
            "step_p95_s": self.speed.p95_s,
            "allocated_bytes": last.allocated_bytes,
            "reserved_bytes": last.reserved_bytes,
            "planned_bytes": self.outcome.planned_bytes,
            "kernels": None if self.outcome.kernels is None else asdict(self.outcome.kernels),
            "num_parameters": self.outcome.num_parameters[0],
            "num_trained_parameters": self.outcome.num_parameters[1],
        }


def write_report(path: Path, recipe: Recipe, records: Sequence[RunRecord], verdict: Verdict) -> None:
    """Write the page of a run, or of several side by side."""
    mark = Mark(Status.GOOD, "ok") if verdict.is_ok else Mark(Status.BAD, "not ok")
    sections = [
        Section("Verdict", [_checks(verdict)]),
        Section("Figures", [_figures(records)]),
        Section("Curves", _curves(records)),
        Section("Gradients", _gradients(records)),
    ]
    loads = [block for record in records for block in _loads(record, several=len(records) > 1)]
    if loads:
        sections.append(Section("Experts", loads))
    kernels = [_kernels(record.outcome.kernels) for record in records if record.outcome.kernels is not None]
    if kernels:
        sections.append(Section("Kernels", kernels))
    sections.append(Section("Recipe", [Preformatted(recipe_yaml(recipe))]))
    write_page(Page("Training run", sections, verdict=mark, subtitle=recipe.description), path)


def _checks(verdict: Verdict) -> Block:
    rows: list[list[Value]] = [
        [Mark(_STATUS[check.result], check.result.value), check.name, check.detail] for check in verdict.checks
    ]
    return Table(["result", "check", "figures"], rows)


def _figures(records: Sequence[RunRecord]) -> Block:
    if len(records) == 1:
        return Facts(_facts(records[0]))
    facts = [_facts(record) for record in records]
    rows: list[list[Value]] = [[key, *(values[key] for values in facts)] for key in facts[0]]
    return Table(["", *(record.name for record in records)], rows)


def _facts(record: RunRecord) -> dict[str, Value]:
    total, trained = record.outcome.num_parameters
    last = record.steps[-1]
    ops = ", ".join(
        f"{field.removesuffix('_implementation')} {impl}" for field, impl in record.recipe.ops.items() if impl != EAGER
    )
    return {
        "layout": record.recipe.layout or "one rank",
        "device": record.recipe.device,
        "compute dtype": record.recipe.compute.value,
        "ops that are not eager": ops or "none",
        "parameters": total,
        "trained parameters": trained,
        "steps": len(record.steps),
        "resumed from step": record.outcome.resumed_from or None,
        "first loss": record.steps[0].loss,
        "last loss": last.loss,
        "tokens a second": record.speed.tokens_per_s,
        "seconds a step, median": record.speed.p50_s,
        "seconds a step, 95 of 100": record.speed.p95_s,
        "allocated, GiB": last.allocated_bytes / _GIB,
        "reserved, GiB": last.reserved_bytes / _GIB,
        "planned state, GiB": record.outcome.planned_bytes / _GIB,
    }


def _curves(records: Sequence[RunRecord]) -> list[Block]:
    return [
        LineChart(_lines(records, "loss"), "Loss", "step", "nats a token"),
        LineChart(_lines(records, "gradient_norm"), "Gradient norm before clipping", "step", "", log_y=True),
        LineChart(_lines(records, "learning_rate"), "Learning rate", "step", ""),
        LineChart(_lines(records, "tokens_per_s"), "Speed", "step", "tokens/s"),
        LineChart(_lines(records, "step_s"), "Time", "step", "s"),
        LineChart(
            [
                Series(record.name, [m.allocated_bytes / _GIB for m in record.steps], _steps(record))
                for record in records
            ],
            "Memory, at most so far",
            "step",
            "GiB",
        ),
    ]


def _lines(records: Sequence[RunRecord], attribute: str) -> list[Series]:
    return [
        Series(record.name, [float(getattr(metrics, attribute)) for metrics in record.steps], _steps(record))
        for record in records
    ]


def _steps(record: RunRecord) -> list[float]:
    return [float(metrics.step) for metrics in record.steps]


def _gradients(records: Sequence[RunRecord]) -> list[Block]:
    charts: list[Block] = []
    for record in records:
        groups = list(record.steps[0].group_norms)
        lines = [Series(group, [m.group_norms[group] for m in record.steps], _steps(record)) for group in groups]
        charts.append(LineChart(lines, f"Norm by group: {record.name}", "step", "", log_y=True))
    return charts


def _loads(record: RunRecord, *, several: bool) -> list[Block]:
    if not record.outcome.routes or record.steps[-1].expert_load is None:
        return []
    of = f": {record.name}" if several else ""
    busiest = [m.expert_load.max_over_mean if m.expert_load else float("nan") for m in record.steps]
    idle = [float(m.expert_load.num_idle) if m.expert_load else float("nan") for m in record.steps]
    shares = [[count * len(counts) / max(1, sum(counts)) for count in counts] for counts in record.outcome.routes]
    return [
        LineChart([Series("busiest expert", busiest, _steps(record))], f"Busiest expert over the mean{of}", "step", ""),
        LineChart(
            [Series("idle experts", idle, _steps(record))], f"Experts without a token, all layers{of}", "step", ""
        ),
        HeatMap(
            [f"layer {layer}" for layer in record.outcome.routed_layers],
            [str(expert) for expert in range(len(shares[0]))],
            shares,
            title=f"Tokens of every expert over the mean, last step{of}",
            corner="layer",
            limit=len(shares[0]) / _num_selected(record),
        ),
    ]


def _kernels(found: KernelReport) -> Block:
    rows: list[list[Value]] = [[op.name, op.num_calls, ", ".join(op.kernels)] for op in found.ops]
    return Table(["op", "calls", "kernels inside"], rows, caption=f"step {found.step}")


def _num_selected(record: RunRecord) -> float:
    """Experts a token goes to: every token is counted once for each. The busiest expert can have no more than all."""
    return max(1.0, sum(record.outcome.routes[0]) / record.steps[-1].num_tokens)
