"""What a run says while it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from k3convert.training.metrics import StepMetrics


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step is done, of so many."""

    metrics: StepMetrics
    num_steps: int


@dataclass(frozen=True, slots=True)
class Noted:
    """Something worth knowing that stops nothing."""

    text: str


Event = Stepped | Noted
