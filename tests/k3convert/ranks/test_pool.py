"""The pool: answers in rank order, and what happens when a rank does not give one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3convert.errors import BadConfig
from k3convert.ranks import RankPool, RanksFailed, RanksSilent

JOBS = Path(__file__).resolve().parent / "jobs.py"
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_every_rank_answers_and_collectives_work(pool: RankPool) -> None:
    assert pool.run(f"{JOBS}:sum_of_ranks", {"start": 3}, timeout_s=LIMIT_S) == [7.0, 7.0]


def test_an_entry_may_be_a_function_of_a_module(pool: RankPool) -> None:
    assert pool.run("os:getpid", timeout_s=LIMIT_S) == list(pool.process_ids)


def test_a_rank_that_fails_is_named_with_its_traceback_and_the_next_job_runs(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="1 of 2 ranks failed") as failed:
        pool.run(f"{JOBS}:fail_on_rank_one", timeout_s=LIMIT_S)

    assert failed.value.offenders == ("rank 1: ValueError: rank one fails",)
    assert "in fail_on_rank_one" in str(failed.value.cause)
    assert len(pool.run(f"{JOBS}:processes", timeout_s=LIMIT_S)) == 2


def test_a_rank_that_hangs_is_killed_in_time_with_its_stack(pool: RankPool) -> None:
    pool.run(f"{JOBS}:processes", timeout_s=LIMIT_S)
    started = time.monotonic()

    with pytest.raises(RanksSilent, match="2 of 2 ranks did not answer within 1 s") as silent:
        pool.run(f"{JOBS}:wait_for_rank_one", timeout_s=1.0)

    assert time.monotonic() - started < 12
    assert "wait_for_rank_one" in str(silent.value.cause)
    assert pool.process_ids == ()


def test_a_rank_that_dies_is_reported_with_its_last_words(pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        pool.run(f"{JOBS}:die_on_rank_one", timeout_s=LIMIT_S)

    assert "died (exit code 9)" in str(failed.value.cause)
    assert "the last words of rank one" in str(failed.value.cause)


def test_an_error_that_all_ranks_raise_comes_back_as_it_was_and_the_pool_lives_on(pool: RankPool) -> None:
    before = pool.run(f"{JOBS}:processes", timeout_s=LIMIT_S)

    with pytest.raises(BadConfig, match="no such layer") as refused:
        pool.run(f"{JOBS}:refuse_everywhere", timeout_s=LIMIT_S)

    assert refused.value.offenders == ("layer 7",)
    assert refused.value.hint == "look again"
    assert pool.run(f"{JOBS}:processes", timeout_s=LIMIT_S) == before
