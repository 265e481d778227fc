"""Where the lines, bars, ticks and labels of a chart lie, in the units of its SVG view box."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from k3convert.reporting.page_blocks import Histogram, LineChart, Series, number_text

WIDTH = 760
HEIGHT = 300
TOP = 14
RIGHT = 16
BOTTOM = 46
# Of a figure in the charts' font, for the room that labels take.
FIGURE_WIDTH = 6.6
NUM_COLOURS = 8
DASHES = ("", "6 3", "2 3", "8 3 2 3")
# A line of more points has no tooltips of its own: they would be larger than the line.
MOST_TOOLTIPS = 400
LABEL_GAP = 8


@dataclass(frozen=True, slots=True)
class Tick:
    """A label at a place on an axis."""

    place: float
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """A point with the text of its tooltip."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """One series: pieces between gaps, each a ``points`` attribute, and single points."""

    name: str
    colour: int
    dashes: str
    pieces: tuple[str, ...]
    points: tuple[Point, ...]
    last: str


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line across the plot."""

    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram."""

    x: float
    y: float
    width: float
    height: float
    label: str
    count: str
    short_count: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart ready to be drawn; lengths are in view box units."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    lines: tuple[Line, ...] = ()
    levels: tuple[Level, ...] = ()
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """A map from values to places along an axis."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, rounded to hundredths."""
        low, high, at = (self._of(v) for v in (self.low, self.high, value))
        return round(self.start + (self.end - self.start) * (at - low) / (high - low), 2)

    def ticks(self, wanted: int) -> tuple[Tick, ...]:
        """Round values inside the axis."""
        values = _log_values(self.low, self.high, wanted) if self.is_log else _round_values(self.low, self.high, wanted)
        return tuple(Tick(self.place(value), _tick_text(value)) for value in values)

    def _of(self, value: float) -> float:
        return math.log10(value) if self.is_log else value


def line_plot(chart: LineChart) -> Plot:
    """Lay out a line chart."""
    drawn = [list(_drawn(series, chart.log_y)) for series in chart.series]
    ys = [y for points in drawn for _, y in points if y is not None]
    ys += [level for level in chart.levels.values() if _is_drawn(level, chart.log_y)]
    xs = [x for points in drawn for x, _ in points]
    y_low, y_high = _range(ys, chart.log_y)
    left = _left_margin(Scale(y_low, y_high, 1, 0, chart.log_y).ticks(6))
    x_scale = Scale(*_range(xs, is_log=False, pad=0), left, WIDTH - RIGHT)
    y_scale = Scale(y_low, y_high, HEIGHT - BOTTOM, TOP, chart.log_y)
    return Plot(
        WIDTH, HEIGHT, left, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM,
        x_scale.ticks(8), y_scale.ticks(6),
        tuple(
            _line(number, series, points, x_scale, y_scale)
            for number, (series, points) in enumerate(zip(chart.series, drawn, strict=True))
        ),
        tuple(
            Level(y_scale.place(value), f"{name} {number_text(value)}")
            for name, value in chart.levels.items() if _is_drawn(value, chart.log_y)
        ),
    )  # fmt: skip


def bar_plot(chart: Histogram) -> Plot:
    """Lay out a histogram: bars stand on zero, or on one count where the heights are logarithms."""
    heights = [math.log10(1 + count) if chart.log_y else count for count in chart.bars.values()]
    left, right, floor = float(RIGHT), WIDTH - RIGHT, HEIGHT - BOTTOM
    step = (right - left) / max(1, len(heights))
    tallest = max(heights, default=0) or 1
    room = floor - TOP - 2 * LABEL_GAP
    bars = tuple(
        Bar(
            round(left + number * step + step * 0.1, 2), round(floor - room * height / tallest, 2),
            round(step * 0.8, 2), round(room * height / tallest, 2), label, number_text(count), _short_text(count),
        )
        for number, (height, (label, count)) in enumerate(zip(heights, chart.bars.items(), strict=True))
    )  # fmt: skip
    return Plot(WIDTH, HEIGHT, left, right, TOP, floor, bars=bars)


def _line(
    number: int, series: Series, points: Sequence[tuple[float, float | None]], x_scale: Scale, y_scale: Scale
) -> Line:
    pieces: list[list[str]] = [[]]
    placed: list[Point] = []
    for x, y in points:
        if y is None:
            pieces.append([])
            continue
        at = (x_scale.place(x), y_scale.place(y))
        pieces[-1].append(f"{at[0]:g},{at[1]:g}")
        placed.append(Point(*at, f"{series.name}: {number_text(y)} at {_tick_text(x)}"))
    alone = {piece[0] for piece in pieces if len(piece) == 1}
    if len(placed) > MOST_TOOLTIPS:
        placed = [point for point in placed if f"{point.x:g},{point.y:g}" in alone]
    values = [y for _, y in points if y is not None]
    return Line(
        series.name,
        number % NUM_COLOURS,
        DASHES[number // NUM_COLOURS % len(DASHES)],
        tuple(" ".join(piece) for piece in pieces if len(piece) > 1),
        tuple(placed),
        number_text(values[-1]) if values else "no values",
    )


def _drawn(series: Series, is_log: bool) -> Iterator[tuple[float, float | None]]:
    xs = series.x if series.x is not None else range(len(series.y))
    for x, y in zip(xs, series.y, strict=True):
        yield float(x), float(y) if _is_drawn(y, is_log) else None


def _is_drawn(value: float, is_log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not is_log)


def _range(values: Sequence[float], is_log: bool, pad: float = 0.05) -> tuple[float, float]:
    """The ends of an axis: of the values with some room around them, never empty."""
    if not values:
        return (1.0, 10.0) if is_log else (0.0, 1.0)
    low, high = min(values), max(values)
    if is_log:
        room = max(pad * math.log10(high / low), 0.1)
        return low / 10**room, high * 10**room
    if low == high:
        room = abs(low) * 0.05 or 0.5
        return low - room, high + room
    return low - pad * (high - low), high + pad * (high - low)


def _round_values(low: float, high: float, wanted: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [number * step for number in range(first, last + 1)]


def _log_values(low: float, high: float, wanted: int) -> list[float]:
    """Powers of ten, thinned; where fewer than two fit, the round values of a linear axis."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if last - first < 1:
        return [value for value in _round_values(low, high, wanted) if value > 0]
    stride = math.ceil((last - first + 1) / wanted)
    return [10.0**exponent for exponent in range(first, last + 1, stride)]


def _tick_text(value: float) -> str:
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        digits = mantissa.rstrip("0").rstrip(".")
        return f"{digits}e{int(exponent)}".replace("-", "−")
    return f"{round(value, 9):,.6g}".replace("-", "−")


def _short_text(count: float) -> str:
    """A count in at most six characters, for a place as wide as a bar."""
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(count) >= least:
            return f"{count / size:.{1 if abs(count) < 100 * size else 0}f}{unit}"
    return number_text(count)


def _left_margin(ticks: Sequence[Tick]) -> float:
    return max((len(tick.text) for tick in ticks), default=1) * FIGURE_WIDTH + 2 * LABEL_GAP + 14
