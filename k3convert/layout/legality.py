"""Whether a network, a batch and a sequence can be laid out so: all reasons at once, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import gcd, log2

from k3convert.errors import UsageError
from k3convert.layout.text import format_layout, layout_of
from k3model.config import KimiK3Config
from k3model.parallel.layout import Layout
from k3model.parallel.legality import Problem, network_problems
from k3model.parallel.stages import max_stages

# How far the search for a legal neighbour goes beyond what was asked for.
_REACH = 2
# What it counts to shard parameters where that was not asked for, or not to.
_SHARDING_DOUBLINGS = 2


class IllegalLayout(UsageError):
    """The network, the batch or the sequence cannot be laid out so."""

    code = "illegal-layout"


def layout_problems(
    layout: Layout, config: KimiK3Config, *, batch: int | None = None, sequence: int | None = None
) -> tuple[Problem, ...]:
    """Every reason why a layout cannot be; empty when it can.

    Args:
        layout: degrees.
        config: geometry of the network.
        batch: rows of a global batch, where it is known.
        sequence: tokens of a row after images are expanded, where it is known.
    """
    return (*network_problems(layout, config), *_data_problems(layout, batch, sequence))


def check_layout(
    layout: Layout, config: KimiK3Config, *, batch: int | None = None, sequence: int | None = None
) -> None:
    """Refuse a layout that cannot be.

    Raises:
        IllegalLayout: with every reason, and the nearest layout that can be.
    """
    problems = layout_problems(layout, config, batch=batch, sequence=sequence)
    if problems:
        nearest = format_layout(nearest_legal(layout, config, batch=batch, sequence=sequence))
        raise IllegalLayout(
            f"the network cannot be laid out in this way, for {len(problems)} reasons"
            if len(problems) > 1
            else "the network cannot be laid out in this way",
            offenders=[problem.reason for problem in problems],
            hint=f"the nearest legal layout is {nearest or 'a single rank'}",
        )


def nearest_legal(
    layout: Layout, config: KimiK3Config, *, batch: int | None = None, sequence: int | None = None
) -> Layout:
    """The legal layout with the least change of degrees, counted in doublings; a smaller world where two are as near.

    A single rank is always legal, so there is one.
    """
    best: tuple[tuple[float, int, tuple[int, ...]], Layout] = (_distance(Layout(), layout), Layout())
    for candidate in _neighbours(layout, config):
        found = (_distance(candidate, layout), candidate)
        if found[0] < best[0] and not layout_problems(candidate, config, batch=batch, sequence=sequence):
            best = found
    return best[1]


def _distance(candidate: Layout, asked: Layout) -> tuple[float, int, tuple[int, ...]]:
    pairs = [(getattr(candidate, axis), getattr(asked, axis)) for axis in ("pp", "dp", "cp", "sp", "ep")]
    doublings = sum(abs(log2(a / b)) for a, b in pairs)
    if candidate.shards_parameters != asked.shards_parameters:
        doublings += _SHARDING_DOUBLINGS
    doublings = round(doublings, 9)  # so that equal sums of logarithms are equal
    return doublings, candidate.world_size, tuple(a for a, _ in pairs)


def _neighbours(asked: Layout, config: KimiK3Config) -> Iterator[Layout]:
    """Layouts with a text of their own around the one asked for."""
    text = config.text
    heads = gcd(*(block.num_heads for block in (text.kda, text.mla) if block is not None))
    experts = text.moe.num_experts if text.moe is not None else 1
    # Where ep does not divide the ranks of a stage, more ranks may be what it lacks.
    dps = _around(asked.dp) | _around(-(-asked.ep // asked.sequence_parts))
    fsdps: list[dict[str, int]] = [{"fsdp": dp} for dp in dps]
    if not asked.shards_parameters:
        fsdps.append({})
    for pp, cp, sp, ep in product(
        {min(degree, max_stages(text)) for degree in _around(asked.pp)},
        _around(asked.cp),
        [degree for degree in _divisors(heads) if degree <= _REACH * asked.sp],
        [degree for degree in _divisors(experts) if degree <= _REACH * asked.ep],
    ):
        for fsdp in fsdps:
            yield layout_of({"pp": pp, "cp": cp, "sp": sp, "ep": ep} | fsdp)


def _around(degree: int) -> set[int]:
    """A degree, its neighbours, and the powers of two up to twice as many."""
    powers = {2**exponent for exponent in range((_REACH * degree).bit_length())}
    return {1, degree, max(1, degree - 1), degree + 1} | powers


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _data_problems(layout: Layout, batch: int | None, sequence: int | None) -> Iterator[Problem]:
    if batch is not None and batch % layout.dp:
        yield Problem("dp", f"the batch has {batch} rows, which dp={layout.dp} does not divide")
    if sequence is not None and sequence % layout.sequence_parts:
        padded = -(-sequence // layout.sequence_parts) * layout.sequence_parts
        yield Problem(
            "cp" if layout.cp > 1 else "sp",
            f"the sequence has {sequence} tokens, which cp x sp = {layout.sequence_parts} does not divide "
            f"(padded to {padded} it would)",
        )
