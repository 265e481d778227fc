"""Every check of the verdict says yes, says no, and says when it was not run."""

from __future__ import annotations

from math import log, nan
from typing import Any

import pytest

from k3convert.training.metrics import StepMetrics
from k3convert.training.outcome import KernelReport, Outcome, ResumeCheck
from k3convert.training.recipe import Recipe
from k3convert.training.recipe_reading import parse_recipe
from k3convert.training.verdict import Check, Result, judge

from .builders import outcome, step, steps

GOOD_LOSSES = [6.3 - 0.1 * number for number in range(40)]


def recipe(*settings: str) -> Recipe:
    return parse_recipe("description: d\ndata: {kind: synthetic}\nexpect: {fall: 0.33}\n", settings)


def check(name: str, run: list[StepMetrics], end: Outcome | None = None, *settings: str) -> Check:
    verdict = judge(recipe(*settings), run, outcome() if end is None else end)
    return next(found for found in verdict.checks if found.name == name)


def test_a_good_run_passes_every_check() -> None:
    verdict = judge(recipe(), steps(GOOD_LOSSES), outcome())

    assert verdict.is_ok
    assert {found.result for found in verdict.checks} == {Result.PASSED}
    assert [found.name for found in verdict.checks] == [
        "finite",
        "first loss",
        "loss falls",
        "gradient norm",
        "memory",
        "resume",
    ]


def test_a_step_that_is_not_finite_is_named_with_its_module() -> None:
    run = [*steps(GOOD_LOSSES), step(41, nan, nonfinite="the output of x")]

    found = check("finite", run)

    assert found.result is Result.FAILED
    assert found.detail == "step 41: the output of x"


@pytest.mark.parametrize(
    ("first", "reason"),
    [(13.51, "deviate by 3.81"), (1.0, "knows these data already")],
)
def test_a_first_loss_outside_of_its_band_is_explained(first: float, reason: str) -> None:
    found = check("first loss", steps([first, *GOOD_LOSSES[1:]]))

    assert found.result is Result.FAILED
    assert reason in found.detail
    assert f"{log(512):.4f}" in found.detail


def test_a_recipe_may_expect_another_first_loss() -> None:
    assert check("first loss", steps(GOOD_LOSSES), None, "expect.first_loss=[6.2, 6.4]").result is Result.PASSED
    assert check("first loss", steps(GOOD_LOSSES), None, "expect.first_loss=[1, 2]").result is Result.FAILED


def test_a_resumed_run_without_its_first_step_does_not_judge_the_first_loss() -> None:
    assert check("first loss", [step(21, 2.0)]).result is Result.NOT_RUN


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([6.3] * 40, "flat"),
        ([6.3 + 0.01 * number for number in range(40)], "rising"),
        ([6.3] * 20 + [6.3 - 0.01 * number for number in range(20)], "falls too little"),
        ([6.3 - 0.3 * number for number in range(10)] + [3.3 + 0.02 * number for number in range(30)], "turns up"),
    ],
)
def test_a_loss_that_does_not_fall_fails(losses: list[float], why: str) -> None:
    assert check("loss falls", steps(losses)).result is Result.FAILED, why


def test_a_loss_that_came_down_to_its_floor_passes() -> None:
    floor = [1.0 + 0.001 * (number * 7 % 5) for number in range(30)]

    assert check("loss falls", steps([6.3, 5.0, 4.0, 3.0, 2.0, *floor])).result is Result.PASSED


def test_three_steps_show_no_trend() -> None:
    assert check("loss falls", steps([3.0, 2.0, 1.0])).result is Result.NOT_RUN


def test_steps_without_labels_are_no_part_of_the_curve() -> None:
    run = steps(GOOD_LOSSES)
    run.insert(20, step(99, 0.0, num_labels=0, gradient_norm=0.0))

    assert check("loss falls", run).result is Result.PASSED


@pytest.mark.parametrize(("norm", "result"), [(9.0, Result.PASSED), (11.0, Result.FAILED)])
def test_a_late_norm_far_above_the_median_fails(norm: float, result: Result) -> None:
    run = steps(GOOD_LOSSES)
    run[30] = step(31, 3.3, gradient_norm=norm)

    assert check("gradient norm", run).result is result


def test_a_run_without_gradients_fails() -> None:
    assert check("gradient norm", steps(GOOD_LOSSES, gradient_norm=0.0)).result is Result.FAILED


def test_groups_that_never_get_a_gradient_are_named() -> None:
    found = check("gradient norm", steps(GOOD_LOSSES, group_norms={"attention": 1.0, "vision": 0.0}))

    assert "no gradient ever reached: vision" in found.detail


@pytest.mark.parametrize(("gib", "result"), [("0.5", Result.PASSED), ("0.01", Result.FAILED)])
def test_memory_is_held_to_the_plan(gib: str, result: Result) -> None:
    run = steps(GOOD_LOSSES, allocated_bytes=int(1.2 * 2**30))

    assert check("memory", run, None, f"expect.activation_gib={gib}").result is result


@pytest.mark.parametrize(
    ("found", "result"),
    [
        (None, Result.NOT_RUN),
        (ResumeCheck(5, (1.0, 1.0), True), Result.PASSED),
        (ResumeCheck(5, (1.0, 1.0), False), Result.FAILED),
        (ResumeCheck(5, (1.0, 1.1), False), Result.FAILED),
    ],
)
def test_resuming_must_be_bitwise_and_not_run_is_not_passed(found: Any, result: Result) -> None:
    assert check("resume", steps(GOOD_LOSSES), outcome(resume_check=found)).result is result


def test_kernels_are_judged_where_they_were_recorded() -> None:
    end = outcome(kernels=KernelReport(2, (), ("moe: did not run",)))

    found = check("kernels", steps(GOOD_LOSSES), end)

    assert found.result is Result.FAILED
    assert found.detail == "moe: did not run"


def test_a_check_that_was_not_run_does_not_fail_the_verdict_and_shows_in_it() -> None:
    verdict = judge(recipe(), steps(GOOD_LOSSES), outcome(resume_check=None))

    assert verdict.is_ok
    assert {"name": "resume", "result": "not run"}.items() <= verdict.document()["checks"][-1].items()
