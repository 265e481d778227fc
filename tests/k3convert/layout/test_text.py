"""Layouts as they are typed."""

from __future__ import annotations

from itertools import product

import pytest

from k3convert.layout import LayoutSyntax, format_layout, parse_layout
from k3model.parallel.layout import Layout


@pytest.mark.parametrize(
    ("text", "layout", "world_size"),
    [
        ("", Layout(), 1),
        ("sp=1", Layout(), 1),
        ("sp=2,ep=2", Layout(sp=2, ep=2), 2),
        ("ep=2,fsdp=4", Layout(dp=4, ep=2, shards_parameters=True), 4),
        ("ep=4", Layout(dp=4, ep=4), 4),
        (" fsdp = 2 , sp = 2 ", Layout(dp=2, sp=2, shards_parameters=True), 4),
        ("sp=2,ep=2,fsdp=2,pp=2,cp=2", Layout(pp=2, dp=2, cp=2, sp=2, ep=2, shards_parameters=True), 16),
    ],
)
def test_a_text_stands_for_one_layout(text: str, layout: Layout, world_size: int) -> None:
    found = parse_layout(text)

    assert found == layout
    assert found.world_size == world_size


def test_every_layout_of_small_degrees_is_read_back_from_its_text() -> None:
    degrees = (1, 2, 4)
    for pp, fsdp, cp, sp, ep in product(degrees, (None, *degrees), degrees, degrees, degrees):
        text = ",".join(
            f"{axis}={n}" for axis, n in zip(("pp", "fsdp", "cp", "sp", "ep"), (pp, fsdp, cp, sp, ep), strict=True) if n
        )

        layout = parse_layout(text)

        assert parse_layout(format_layout(layout)) == layout


def test_every_part_that_cannot_be_read_is_named() -> None:
    with pytest.raises(LayoutSyntax) as caught:
        parse_layout("tp=2,sp=0,ep=x,cp=2,cp=4,fsdp")

    assert [offender.split(":")[0] for offender in caught.value.offenders] == [
        "'tp=2'",
        "'sp=0'",
        "'ep=x'",
        "'cp=4'",
        "'fsdp'",
    ]


def test_a_layout_without_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no text stands for it"):
        format_layout(Layout(dp=2))


@pytest.mark.parametrize("axis", ["pp", "dp", "cp", "sp", "ep"])
def test_a_degree_below_one_is_refused(axis: str) -> None:
    with pytest.raises(ValueError, match=f"{axis}=0"):
        Layout(**{axis: 0})
