"""``A_log`` on disk: one value a head, with or without zeros up to a multiple of 128."""

from __future__ import annotations

from collections.abc import Iterable

from k3convert.planning.plan import Box
from k3model.census import padded_num_heads
from k3model.config import KimiK3Config

NAME_END = ".A_log"


def num_padding(config: KimiK3Config, name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> int | None:
    """Zeros to append to what is stored (below 0: to take away), or None when this is not a matter of padding."""
    kda = config.text.kda
    if kda is None or not name.endswith(NAME_END):
        return None
    lengths = ((kda.num_heads,), (padded_num_heads(kda.num_heads),))
    return wanted[0] - stored[0] if stored in lengths and wanted in lengths else None


def split_rows(boxes: Iterable[Box], count: int) -> tuple[list[Box], list[Box]]:
    """The parts of a tensor's boxes before row ``count``, and those from there on as a tensor of their own."""
    before: list[Box] = []
    after: list[Box] = []
    for box in boxes:
        rows = box.hi[0] - box.lo[0]
        kept = min(rows, max(0, count - box.at[0]))
        middle = box.lo[0] + kept
        if kept:
            before.append(box._replace(hi=(middle, *box.hi[1:])))
        if kept < rows:
            after.append(box._replace(lo=(middle, *box.lo[1:]), at=(box.at[0] + kept - count, *box.at[1:])))
    return before, after
