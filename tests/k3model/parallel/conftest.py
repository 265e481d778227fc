"""Pools of gloo ranks, one a world size, that live through many tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3convert.ranks import RankPool, RanksFailed

JOBS = Path(__file__).resolve().parent / "jobs.py"


class JobPool:
    """Runs the functions of ``jobs.py`` on every rank."""

    def __init__(self, world_size: int) -> None:
        self.ranks = RankPool(world_size)

    def run(self, job: str, *, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        try:
            return self.ranks.run(f"{JOBS}:{job}", arguments, timeout_s=timeout_s)
        except RanksFailed as error:
            raise RuntimeError("\n".join((*error.offenders, str(error.cause)))) from error


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], JobPool]]:
    """The pool of a world size."""
    pools: dict[int, JobPool] = {}

    def get(world_size: int) -> JobPool:
        if world_size not in pools:
            pools[world_size] = JobPool(world_size)
        return pools[world_size]

    yield get
    for opened in pools.values():
        opened.ranks.close()
