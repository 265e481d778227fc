"""What a report is made of, as data: sections of facts, tables, charts, trees and text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """How something went. Its symbol tells it without colour."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    NEUTRAL = "neutral"

    @property
    def symbol(self) -> str:
        """One character."""
        return _SYMBOLS[self]


_SYMBOLS = {Status.GOOD: "✓", Status.WARNING: "!", Status.BAD: "✗", Status.NEUTRAL: "–"}


@dataclass(frozen=True, slots=True)
class Mark:
    """A text with a status: ``Mark(Status.GOOD, "bitwise")``."""

    status: Status
    text: str


Value = str | int | float | bool | None | Mark


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one a line."""

    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a head. Columns of numbers stand to the right; a wide table scrolls in a box of its own.

    Raises:
        ValueError: a row is not as long as the head.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Value]]
    caption: str = ""

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.head)]
        if wrong:
            raise ValueError(f"{len(wrong)} of {len(self.rows)} rows have not {len(self.head)} cells: {wrong[0]}")

    def is_numeric(self, column: int) -> bool:
        """Whether a column holds numbers, and nothing else but gaps."""
        values = [row[column] for row in self.rows if row[column] is not None]
        return bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart; a y that is NaN or infinite leaves a gap.

    Raises:
        ValueError: x and y are not equally many.
    """

    name: str
    y: Sequence[float]
    x: Sequence[float] | None = None
    """None counts from zero."""

    def __post_init__(self) -> None:
        if self.x is not None and len(self.x) != len(self.y):
            raise ValueError(f"series {self.name!r} has {len(self.x)} x and {len(self.y)} y")


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over one pair of axes.

    Attributes:
        series: at least one; each has its own colour, from the ninth on also its own dashes.
        title: above the chart.
        x_label: what x is, with its unit.
        y_label: what y is, with its unit.
        log_y: a logarithmic y axis; values of zero and below are gaps.
        levels: horizontal lines by name, such as a limit.
    """

    series: Sequence[Series]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    log_y: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bars, one a class, with the count above each.

    Attributes:
        bars: classes in order, with their counts.
        log_y: bar heights by the logarithm of the count, so that rare classes show.
    """

    bars: Mapping[str, float]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A grid of numbers, darker the nearer they are to the limit, and marked beyond it.

    Attributes:
        rows: names down the side.
        columns: names along the top.
        values: a row of numbers for each row name; None where there is none.
        limit: the value from which a cell counts as bad.
        zero_text: what stands for a value of exactly zero.

    Raises:
        ValueError: the grid has not one row a row name and one value a column.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    title: str = ""
    corner: str = ""
    limit: float = 1.0
    zero_text: str = "0"

    def __post_init__(self) -> None:
        if len(self.values) != len(self.rows) or any(len(row) != len(self.columns) for row in self.values):
            raise ValueError(f"values must be {len(self.rows)} rows of {len(self.columns)}")

    def shade(self, value: float | None) -> int:
        """How dark a cell is: 0 for none of the limit, 9 for all of it and beyond."""
        if value is None or math.isnan(value):
            return 0
        return math.floor(9 * min(1.0, max(0.0, value / self.limit)))

    def cell_text(self, value: float) -> str:
        """A number in two digits."""
        if value == 0:
            return self.zero_text
        return f"{value:.2g}" if math.isfinite(value) else number_text(value)

    def is_beyond(self, value: float | None) -> bool:
        """Whether a cell is marked as bad; NaN is."""
        return value is not None and not value <= self.limit


@dataclass(frozen=True, slots=True)
class Node:
    """A branch of a tree: a line, details below it, and further branches."""

    label: str
    status: Status = Status.NEUTRAL
    facts: Mapping[str, Value] = field(default_factory=dict)
    children: Sequence[Node] = ()
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes that fold; the browser does it, without a script."""

    nodes: Sequence[Node]


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Text whose lines and spaces stay as they are."""

    text: str


Block = Facts | Table | LineChart | Histogram | HeatMap | Tree | Text | Preformatted


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under a title. ``note`` is a sentence below it."""

    title: str
    blocks: Sequence[Block]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report.

    Attributes:
        title: of the page and of the browser's tab.
        sections: in reading order; from three on they get a table of contents.
        verdict: shown beside the title.
        subtitle: what the page is about, in a sentence.
    """

    title: str
    sections: Sequence[Section]
    verdict: Mark | None = None
    subtitle: str = ""


def value_text(value: Value) -> str:
    """A value for a person: numbers as in ``number_text``, a dash for none, yes and no."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return number_text(value)
        case Mark():
            return value.text
        case _:
            return str(value)


def number_text(value: float) -> str:
    """Whole numbers in full with separators, others with four significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−") if abs(value) < 1e4 else f"{value:,.0f}".replace("-", "−")
