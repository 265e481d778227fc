"""What a loss curve says: its trend, and how far two curves lie apart. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import median

# Two-sided 95 %.
_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Trend:
    """The median slope of all pairs of points, and bounds that hold the true one 19 times in 20.

    Source: Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63 (1968), for equal steps and
    no ties.
    """

    slope: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Trend:
        """The trend of values at equal distances.

        Raises:
            ValueError: there are fewer than two.
        """
        if len(values) < 2:
            raise ValueError(f"a trend needs two values, got {len(values)}")
        num = len(values)
        slopes = sorted((values[j] - values[i]) / (j - i) for i, j in combinations(range(num), 2))
        spread = _Z * sqrt(num * (num - 1) * (2 * num + 5) / 18)
        below = max(0, round((len(slopes) - spread) / 2))
        above = min(len(slopes) - 1, round((len(slopes) + spread) / 2))
        return cls(median(slopes), slopes[below], slopes[above])


def end_level(values: Sequence[float]) -> float:
    """Where a curve ends: the median of its last tenth, of three values at least."""
    return median(values[-max(3, len(values) // 10) :])


def relative_distances(curve: Sequence[float], reference: Sequence[float]) -> list[float]:
    """How far a curve is from another at every step that both have, over the other's value there."""
    return [abs(a - b) / abs(b) if b else float(a != b) for a, b in zip(curve, reference, strict=False)]
