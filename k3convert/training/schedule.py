"""The learning rate of every step."""

from __future__ import annotations

from math import cos, pi

from k3convert.training.recipe import Optimizer


def learning_rate(settings: Optimizer, step: int, num_steps: int) -> float:
    """The rate of a step, counted from 1: it rises linearly over the warm-up, then falls along a cosine.

    The last step has ``final_rate`` times the peak.
    """
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    span = max(1, num_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    part = settings.final_rate + (1 - settings.final_rate) * (1 + cos(pi * progress)) / 2
    return settings.learning_rate * part
