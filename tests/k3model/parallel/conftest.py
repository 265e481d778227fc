"""Pools of gloo ranks, one a world size, that live through many tests, and the same step on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3convert.ranks import RankPool, RanksFailed
from k3model.parallel.layout import Layout

JOBS = Path(__file__).resolve().parent / "jobs.py"
STEP_JOBS = JOBS.with_name("step_jobs.py")

# float64: sums over tokens are split between ranks, and matrix products have other numbers of rows, so that sums run in
# another order. The tolerance leaves the rounding of such sums (1e-16 each) five decimal orders.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}

Step = dict[str, Any]


class JobPool:
    """Runs the functions of ``jobs.py``, or of another file, on every rank."""

    def __init__(self, world_size: int) -> None:
        self.ranks = RankPool(world_size)

    def run(self, job: str, *, file: Path = JOBS, timeout_s: float = 120.0, **arguments: Any) -> list[Any]:
        try:
            return self.ranks.run(f"{file}:{job}", arguments, timeout_s=timeout_s)
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


@pytest.fixture(scope="session")
def run(pool: Callable[[int], JobPool]) -> Callable[..., list[Any]]:
    """Runs a function of ``step_jobs.py`` on the ranks of a layout: ``run(job, layout, ...)``."""

    def on_ranks(job: str, layout: Layout, **arguments: Any) -> list[Any]:
        return pool(layout.world_size).run(job, file=STEP_JOBS, layout=layout, **arguments)

    return on_ranks


@pytest.fixture(scope="session")
def jobs() -> Any:
    """The module of the jobs, with its batches, in this process."""
    spec = spec_from_file_location("jobs", JOBS)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def single(jobs: Any) -> Callable[..., Step]:
    """The step of a batch on one process, once a batch; the batch is one of ``jobs.BATCHES`` by name, or itself."""
    steps: dict[tuple[str, str], Step] = {}

    def get(batch: str | Mapping[str, Tensor], **options: Any) -> Step:
        if not isinstance(batch, str):
            result: Step = jobs.step(None, batch, **options)
            return result
        key = (batch, repr(options))
        if key not in steps:
            steps[key] = jobs.step(None, jobs.BATCHES[batch](), **options)
        return steps[key]

    return get


@pytest.fixture(scope="session")
def compare(pool: Callable[[int], JobPool], single: Callable[..., Step], jobs: Any) -> Callable[..., list[Step]]:
    """Runs a step in a layout and asserts that it is the step of one process; returns what the ranks answered.

    ``model`` names another network than the usual one; other options are of the layout's run alone.
    """

    def run(
        layout: Layout, batch: str | Mapping[str, Tensor], *, model: Mapping[str, Any] | None = None, **options: Any
    ) -> list[Step]:
        rows = jobs.BATCHES[batch]() if isinstance(batch, str) else batch
        answers = pool(layout.world_size).run("step", layout=layout, batch=rows, model=model, **options)
        assert_equal_steps(answers, layout, single(batch, model=model))
        return answers

    return run


def assert_equal_steps(answers: list[Step], layout: Layout, want: Step) -> None:
    torch.testing.assert_close(logits_of(answers, layout), want["logits"], **TOLERANCE)
    for answer in answers:
        torch.testing.assert_close(answer["loss"], want["loss"], **TOLERANCE)
        torch.testing.assert_close(answer["norm"].to(want["norm"].dtype), want["norm"], **TOLERANCE)
    gradients = answers[0]["gradients"]
    assert set(want["gradients"]) <= set(gradients)
    for name, gradient in gradients.items():
        if name in want["gradients"]:
            torch.testing.assert_close(
                gradient, want["gradients"][name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert not gradient.any(), name


def logits_of(answers: list[Step], layout: Layout) -> Tensor:
    """The ranks' logits as those of the whole batch."""
    parts = layout.sequence_parts
    rows = [
        torch.cat([answer["logits"] for answer in answers[first : first + parts]], dim=1)
        for first in range(0, len(answers), parts)
    ]
    return torch.cat(rows)
