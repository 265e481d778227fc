"""Layouts as they are typed: ``sp=2,ep=2,fsdp=2,pp=2,cp=2``."""

from __future__ import annotations

from collections.abc import Mapping

from k3convert.errors import UsageError
from k3model.parallel.layout import Layout

AXES = ("pp", "fsdp", "cp", "sp", "ep")


class LayoutSyntax(UsageError):
    """The text names no layout."""

    code = "layout-syntax"


def parse_layout(text: str) -> Layout:
    """Read a layout.

    ``fsdp=N`` splits the batch over N ranks and shards parameters over them and the ranks of ``cp`` and ``sp``. A text
    that names ``ep=N`` alone splits the batch over N ranks too, with every other parameter replicated. The empty text
    is one rank.

    Raises:
        LayoutSyntax: with every part that cannot be read.
    """
    degrees: dict[str, int] = {}
    faults = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, number = (piece.strip() for piece in part.partition("="))
        if axis not in AXES:
            faults.append(f"{part!r}: the axes are {', '.join(AXES)}")
        elif not (number.isascii() and number.isdigit() and int(number) >= 1):
            faults.append(f"{part!r}: the degree is a whole number from 1 on")
        elif axis in degrees:
            faults.append(f"{part!r}: {axis} is named twice")
        else:
            degrees[axis] = int(number)
    if faults:
        raise LayoutSyntax(
            f"{text!r} is no layout", offenders=faults, hint="write degrees by axis, for example sp=2,ep=2,fsdp=2"
        )
    return layout_of(degrees)


def layout_of(degrees: Mapping[str, int]) -> Layout:
    """The layout that degrees by axis stand for; see ``parse_layout``."""
    named = {axis for axis, degree in degrees.items() if degree > 1}
    dp = degrees["ep"] if named == {"ep"} and "fsdp" not in degrees else degrees.get("fsdp", 1)
    others = {axis: degrees.get(axis, 1) for axis in ("pp", "cp", "sp", "ep")}
    return Layout(dp=dp, shards_parameters="fsdp" in degrees, **others)


def format_layout(layout: Layout) -> str:
    """The text that ``parse_layout`` reads as this layout; axes of degree 1 are left out.

    Raises:
        ValueError: no text stands for the layout: a batch split over ranks with replicated parameters, other than by
            ``ep`` alone.
    """
    degrees = {"pp": layout.pp, "cp": layout.cp, "sp": layout.sp, "ep": layout.ep}
    parts = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
    if layout.shards_parameters:
        parts.insert(1 if layout.pp > 1 else 0, f"fsdp={layout.dp}")
    text = ",".join(parts)
    if parse_layout(text) != layout:
        raise ValueError(f"{layout} splits the batch without sharding parameters; no text stands for it")
    return text
