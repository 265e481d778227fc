"""The learning rate: up, then down a cosine, to the figures written down here."""

from __future__ import annotations

from math import isclose

import pytest

from k3convert.training.recipe import Optimizer
from k3convert.training.schedule import learning_rate

SETTINGS = Optimizer(learning_rate=1.0, warmup_steps=4, final_rate=0.1)


@pytest.mark.parametrize(
    ("step", "rate"),
    [(1, 0.25), (2, 0.5), (4, 1.0), (13, 0.55), (22, 0.1), (30, 0.1)],
)
def test_the_rate_rises_over_the_warm_up_and_falls_to_its_last_part(step: int, rate: float) -> None:
    assert isclose(learning_rate(SETTINGS, step, 22), rate)


def test_without_warm_up_the_first_step_is_on_the_cosine() -> None:
    settings = Optimizer(learning_rate=2.0, warmup_steps=0, final_rate=0.0)

    assert learning_rate(settings, 10, 10) == 0.0
    assert isclose(learning_rate(settings, 5, 10), 1.0)


def test_a_run_of_one_step_has_a_rate() -> None:
    assert learning_rate(Optimizer(learning_rate=1.0, final_rate=0.5), 1, 1) == 0.5
