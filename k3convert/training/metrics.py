"""What is known of a step, and its line in ``metrics.jsonl``. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How evenly a step's tokens went to the experts.

    Attributes:
        max_over_mean: of the layer where it is largest: tokens of the busiest expert over the mean.
        num_idle: experts, of all layers, that got no token.
        max_over_mean_of_layers: by layer, in order.
    """

    max_over_mean: float
    num_idle: int
    max_over_mean_of_layers: tuple[float, ...]

    @classmethod
    def of(cls, counts_of_layers: Sequence[Sequence[int]]) -> ExpertLoad | None:
        """Of tokens an expert, a layer a row; None where there are no experts or no tokens."""
        if not counts_of_layers or not any(counts_of_layers[0]):
            return None
        ratios = tuple(max(counts) * len(counts) / sum(counts) for counts in counts_of_layers)
        return cls(max(ratios), sum(counts.count(0) for counts in map(list, counts_of_layers)), ratios)


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step.

    Attributes:
        step: from 1 on.
        loss: mean over the counted labels of the global batch; 0 where none is counted.
        num_labels, num_tokens: of the global batch.
        learning_rate: of this step.
        gradient_norm: before clipping.
        group_norms: the same, by group of parameters.
        step_s: seconds, data and everything.
        allocated_bytes, reserved_bytes: the rank's that has most: since the start, at most.
        expert_load: None without experts.
        nonfinite: where the first NaN or infinity is; the step then changed nothing.
    """

    step: int
    loss: float
    num_labels: int
    num_tokens: int
    learning_rate: float
    gradient_norm: float
    group_norms: Mapping[str, float]
    step_s: float
    allocated_bytes: int
    reserved_bytes: int
    expert_load: ExpertLoad | None = None
    nonfinite: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the global batch a second."""
        return self.num_tokens / self.step_s

    def document(self) -> dict[str, Any]:
        """The step as a JSON object."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> StepMetrics:
        """The step that ``document`` describes."""
        values = {name: value for name, value in document.items() if name != "tokens_per_s"}
        load = values["expert_load"]
        if load is not None:
            load = ExpertLoad(load["max_over_mean"], load["num_idle"], tuple(load["max_over_mean_of_layers"]))
        return cls(**(values | {"expert_load": load}))

    def line(self, num_steps: int) -> str:
        """The step for a person, in one line."""
        load = "" if self.expert_load is None else f"  busiest expert {self.expert_load.max_over_mean:.1f}x"
        fault = "" if self.nonfinite is None else f"  NOT FINITE: {self.nonfinite}"
        return (
            f"step {self.step:>{len(str(num_steps))}}/{num_steps}  loss {self.loss:.4f}  "
            f"norm {self.gradient_norm:.3g}  rate {self.learning_rate:.2e}  {self.tokens_per_s:,.0f} tokens/s  "
            f"{self.step_s:.2f} s  {self.allocated_bytes / 2**30:.2f} GiB{load}{fault}"
        )


@dataclass(slots=True)
class MetricsLog:
    """``metrics.jsonl``, a line a step; a resumed run takes off what came after its checkpoint."""

    folder: Path
    steps: list[StepMetrics] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / METRICS_NAME

    @classmethod
    def read(cls, folder: Path) -> MetricsLog:
        """The log of an earlier run; a line that was cut short counts as absent."""
        log = cls(folder)
        if log.path.exists():
            whole = [line for line in log.path.read_text("utf-8").split("\n")[:-1] if line]
            log.steps = [StepMetrics.from_document(json.loads(line)) for line in whole]
        return log

    @classmethod
    def resumed(cls, folder: Path, step: int) -> MetricsLog:
        """The log of an earlier run up to a step; what came after it is taken off."""
        log = cls.read(folder)
        log.steps = [metrics for metrics in log.steps if metrics.step <= step]
        log.path.write_text("".join(_line(metrics) for metrics in log.steps), "utf-8")
        return log

    def add(self, metrics: StepMetrics) -> None:
        """Append a step."""
        self.steps.append(metrics)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(metrics))


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds a step, the first one aside, and tokens a second."""

    p50_s: float
    p95_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, steps: Sequence[StepMetrics]) -> Speed:
        """Of a run's steps; the first one pays for start-up."""
        measured = list(steps[1:] or steps)
        times = [metrics.step_s for metrics in measured]
        cuts = quantiles(times, n=20, method="inclusive") if len(times) > 1 else times * 19
        return cls(cuts[9], cuts[18], sum(metrics.num_tokens for metrics in measured) / sum(times))


def _line(metrics: StepMetrics) -> str:
    return json.dumps(metrics.document()) + "\n"
