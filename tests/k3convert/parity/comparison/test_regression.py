"""Two reports of one session beside each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3convert.parity.cells import parse_cell
from k3convert.parity.comparison import compare
from k3convert.parity.expectation import EVERYTHING, Expectation
from k3convert.parity.outcome import CellOutcome, Status, status_of
from k3convert.parity.records import Kind, Run
from k3convert.parity.report.build import build_report
from k3convert.parity.report.document import ParityReport, SessionDocument
from k3convert.parity.report.regression import OtherSession, regressions
from k3model.config import KimiK3Config
from k3model.presets import tiny_config_dict

SESSION = SessionDocument(
    checkpoint="k3", weights_digest="ab" * 32, seed=0, rows=2, tokens=32, num_layers=None, level="model",
    device="cpu", golden_dtype="fp64", pins_shapes=True, deterministic=False, fault=None, perturbs=False,
)  # fmt: skip
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "noise": 3e-3}
ANYTHING = Expectation(frozenset(), "any")
LOGITS = (Kind.LOGITS, "logits")


@pytest.fixture
def report(make_run: Callable[..., Run]) -> Callable[..., ParityReport]:
    """A report of one cell: its noise, and what is done to its logits."""
    config = KimiK3Config.from_dict(tiny_config_dict())

    def make(session: SessionDocument = SESSION, expectation: Expectation = ANYTHING, **candidate: Any) -> ParityReport:
        cell = parse_cell("sp=2,dtype=bf16")
        runs = make_run(dtype=torch.float64), make_run(**BF16), make_run(**(BF16 | candidate))
        found = compare(cell, *runs, expectation)
        return build_report([CellOutcome(cell, status_of(found, ()), "any", found)], session, config)

    return make


def test_equally_good_runs_are_no_regression(report: Callable[..., ParityReport]) -> None:
    assert regressions(report(seed=1), report(seed=2)) == ()


def test_a_pool_that_uses_more_of_its_limit_is_one_though_it_passes(report: Callable[..., ParityReport]) -> None:
    def blur(value: Tensor) -> Tensor:
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(9))
        return (value.float() + 6e-3 * noise).to(value.dtype)

    new = report(seed=1, changes={LOGITS: blur})

    found = regressions(report(seed=1), new)
    assert new.passed
    assert [each.what.split(" uses")[0] for each in found] == ["logits (logits)"]


def test_bits_that_are_lost_are_one(report: Callable[..., ParityReport]) -> None:
    old = report(expectation=Expectation(EVERYTHING, "copies"))

    whats = [each.what for each in regressions(old, report(seed=1))]
    assert whats[0].startswith("need no longer be bitwise: logits, loss")
    assert whats[1] == "0 tensors are bitwise, 40 were"


def test_a_cell_that_is_gone_fails_or_no_longer_runs_is_one(report: Callable[..., ParityReport]) -> None:
    old = report(seed=1)
    gone = old.model_copy(update={"cells": ()})
    not_run = old.cells[0].model_copy(update={"status": str(Status.NOT_RUN), "reason": "no device", "comparison": None})

    assert [each.what for each in regressions(old, gone)] == ["is not in the new report"]
    stopped = regressions(old, old.model_copy(update={"cells": (not_run,)}))
    assert [each.what for each in stopped] == ["was passed, is not run: no device"]
    assert any("is failed" in each.what for each in regressions(old, report(seed=1, noise=0.02)))


def test_a_cell_that_had_failed_has_nothing_to_lose(report: Callable[..., ParityReport]) -> None:
    failed = report(seed=1, noise=0.02)

    assert regressions(failed, failed.model_copy(update={"cells": ()})) == ()


def test_reports_of_other_weights_or_inputs_are_refused(report: Callable[..., ParityReport]) -> None:
    other = SESSION.model_copy(update={"weights_digest": "cd" * 32, "seed": 7})

    with pytest.raises(OtherSession) as caught:
        regressions(report(), report(session=other))
    assert [offender.split(":")[0] for offender in caught.value.offenders] == ["weights_digest", "seed"]
