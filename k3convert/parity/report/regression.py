"""A report beside an older one: what got worse, even where everything still passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k3convert.errors import BadInput
from k3convert.parity.report.document import CellDocument, ComparisonDocument, ParityReport

# Ratios of equally good runs scatter by a tenth; a pool that uses half as much again of its limit is another program.
HEADROOM_GROWTH = 1.5
# Below this share of a limit growth is no news.
LEAST_HEADROOM = 0.1
_SAME_SESSION = ("weights_digest", "seed", "rows", "tokens", "num_layers", "level", "golden_dtype", "pins_shapes")


class OtherSession(BadInput):
    """Two reports are of different weights, inputs or options, so that their figures say nothing about each other."""

    code = "other-session"


@dataclass(frozen=True, slots=True)
class Regression:
    """Something that was better in the older report."""

    cell: str
    what: str


def regressions(old: ParityReport, new: ParityReport, *, growth: float = HEADROOM_GROWTH) -> tuple[Regression, ...]:
    """What got worse from one report to the next: cell by cell, in the order of the older one.

    Args:
        old: what is held against.
        new: what is judged.
        growth: factor of a pool's headroom that counts as worse.

    Raises:
        OtherSession: the reports are not of the same session; every difference is listed.
    """
    before, after = old.session.model_dump(), new.session.model_dump()
    differing = [name for name in _SAME_SESSION if before[name] != after[name]]
    if differing:
        raise OtherSession(
            f"the reports are of different sessions: {len(differing)} facts differ",
            offenders=[f"{name}: {before[name]!r} and {after[name]!r}" for name in differing],
        )
    cells = {cell.cell: cell for cell in new.cells}
    return tuple(
        Regression(cell.cell, what)
        for cell in old.cells if cell.status == "passed"
        for what in _worse(cell, cells.get(cell.cell), growth)
    )  # fmt: skip


def _worse(old: CellDocument, new: CellDocument | None, growth: float) -> Iterator[str]:
    if new is None:
        yield "is not in the new report"
        return
    if new.status != old.status:
        yield f"was {old.status}, is {new.status}: {new.reason}"
    if old.comparison is not None and new.comparison is not None:
        yield from _worse_comparison(old.comparison, new.comparison, growth)


def _worse_comparison(old: ComparisonDocument, new: ComparisonDocument, growth: float) -> Iterator[str]:
    lost = sorted(set(old.bitwise_kinds) - set(new.bitwise_kinds))
    if lost:
        yield f"need no longer be bitwise: {', '.join(lost)}; {new.bitwise_reason}"
    if new.num_bitwise < old.num_bitwise:
        yield f"{new.num_bitwise} tensors are bitwise, {old.num_bitwise} were"
    before = {(pool.kind, pool.layer_kind, pool.path): pool.headroom for pool in old.pools}
    for pool in new.pools:
        was = before.get((pool.kind, pool.layer_kind, pool.path))
        if was is not None and pool.headroom > max(growth * was, LEAST_HEADROOM):
            yield f"{pool.path} ({pool.kind}) uses {pool.headroom:.3g} of its limit, it used {was:.3g}"
