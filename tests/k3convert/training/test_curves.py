"""Trends and distances of loss curves."""

from __future__ import annotations

import random

import pytest

from k3convert.training.curves import Trend, end_level, relative_distances


def test_the_slope_of_a_line_is_its_own_and_certain() -> None:
    trend = Trend.of([5.0 - 0.25 * step for step in range(20)])

    assert (trend.slope, trend.low, trend.high) == (-0.25, -0.25, -0.25)


def test_a_single_wild_value_hardly_moves_the_slope() -> None:
    line = [5.0 - 0.25 * step for step in range(20)]
    line[10] = 500.0

    assert -0.27 < Trend.of(line).slope < -0.23


def test_noise_without_a_trend_has_zero_within_its_bounds_19_times_in_20() -> None:
    chance = random.Random(1)
    trends = [Trend.of([chance.gauss(0, 1) for _ in range(20)]) for _ in range(400)]

    num_missed = sum(not trend.low <= 0 <= trend.high for trend in trends)

    # 400 draws at 5 %: mean 20, standard deviation 4.4; the bounds are 4.5 of these
    assert num_missed <= 40


def test_a_trend_that_noise_does_not_hide_has_bounds_below_zero() -> None:
    chance = random.Random(2)

    assert Trend.of([-0.5 * step + chance.gauss(0, 1) for step in range(20)]).high < 0


def test_one_value_has_no_trend() -> None:
    with pytest.raises(ValueError, match="two values"):
        Trend.of([1.0])


def test_the_end_is_the_median_of_the_last_tenth() -> None:
    assert end_level([9.0] * 37 + [1.0, 2.0, 8.0, 3.0]) == 2.5
    assert end_level([5.0, 4.0, 9.0, 1.0]) == 4.0


def test_distances_are_relative_to_the_reference() -> None:
    assert relative_distances([1.1, 2.0, 3.0], [1.0, 4.0]) == [pytest.approx(0.1), 0.5]
    assert relative_distances([0.0, 1.0], [0.0, 0.0]) == [0.0, 1.0]
