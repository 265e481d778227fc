"""Which part of a plan this process does: all of it, one array job's share, or one rank's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s

from k3convert.errors import UsageError
from k3convert.planning.plan import Item


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``index`` of ``count``; ``run`` names a group of ranks that live and fail together, if there is one."""

    index: int = 0
    count: int = 1
    run: str | None = None
    local_count: int = 1

    @property
    def name(self) -> str:
        """The part in file names."""
        return f"part-{self.index}-of-{self.count}"

    def items(self, items: Sequence[Item]) -> range:
        """The items of this part: neighbouring ones, cut so that the parts hold about the same number of bytes."""
        total = sum(item.nbytes for item in items) or 1
        first = last = None
        before = 0
        for number, item in enumerate(items):
            owner = min(self.count - 1, (before + item.nbytes // 2) * self.count // total)
            if owner == self.index:
                first = number if first is None else first
                last = number
            before += item.nbytes
        return range(0) if first is None or last is None else range(first, last + 1)


def parse_part(text: str) -> Part:
    """``I/N`` with I from 0.

    Raises:
        UsageError: not of that form, or I not below N.
    """
    left, slash, right = text.partition("/")
    if not (slash and left.isdecimal() and right.isdecimal()):
        raise UsageError(f"--part {text}: wanted I/N, for example 0/8")
    index, count = int(left), int(right)
    if not 0 <= index < count:
        raise UsageError(f"--part {text}: I counts from 0 and must be below N")
    return Part(index, count)


def part_of_torchrun(environment: Mapping[str, str] = os.environ) -> Part | None:
    """This rank's part under torchrun with more than one rank, or None.

    Raises:
        UsageError: RANK and WORLD_SIZE do not fit.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError as error:
        raise UsageError("RANK, WORLD_SIZE or LOCAL_WORLD_SIZE is not a number") from error
    if not 0 <= rank < world or local < 1:
        raise UsageError(f"RANK={rank} and WORLD_SIZE={world} do not fit")
    if world == 1:
        return None
    fields = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    run = blake2s("|".join(environment.get(name, "") for name in fields).encode(), digest_size=8).hexdigest()
    return Part(rank, world, run, local)
