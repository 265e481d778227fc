"""Steps and outcomes of runs that never were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from k3convert.training.metrics import StepMetrics
from k3convert.training.outcome import Outcome, ResumeCheck


def step(number: int, loss: float, **fields: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "num_labels": 100,
        "num_tokens": 128,
        "learning_rate": 1e-3,
        "gradient_norm": 1.0,
        "group_norms": {"attention": 1.0},
        "step_s": 0.5,
        "allocated_bytes": 2**30,
        "reserved_bytes": 2**30,
    }
    return StepMetrics(step=number, loss=loss, **(values | fields))


def steps(losses: Sequence[float], **fields: Any) -> list[StepMetrics]:
    return [step(number, loss, **fields) for number, loss in enumerate(losses, start=1)]


def outcome(**fields: Any) -> Outcome:
    values: dict[str, Any] = {
        "resumed_from": 0,
        "vocab_size": 512,
        "num_parameters": (10, 8),
        "planned_bytes": 2**30,
        "resume_check": ResumeCheck(21, (1.5, 1.5), True),
        "kernels": None,
        "routes": (),
        "routed_layers": (),
    }
    return Outcome(**(values | fields))
