"""Cells of a session: run, judged, followed to where they differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from k3convert.layout import IllegalLayout
from k3convert.parity.cells import parse_cell
from k3convert.parity.comparison import Verdict
from k3convert.parity.divergence import Origin
from k3convert.parity.expectation import FORWARD
from k3convert.parity.outcome import Status
from k3convert.parity.records import Kind
from k3convert.parity.run_spec import Level
from k3convert.parity.session import ParitySession


def slow(text: str) -> Any:
    """A cell for the long tests."""
    return pytest.param(text, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "text",
    ["dtype=fp32", slow("dtype=bf16,data=packed,ac=on"), slow("dtype=fp32,data=padded")],
)
def test_one_rank_has_the_bits_of_the_baseline_forward_and_backward(session: ParitySession, text: str) -> None:
    outcome = session.judge(parse_cell(text))

    assert outcome.status is Status.PASSED, outcome.error
    assert outcome.comparison is not None
    assert outcome.comparison.verdict is Verdict.BITWISE


@pytest.mark.parametrize(
    "text", ["sp=2,dtype=fp32", slow("ep=2,dtype=bf16"), slow("fsdp=2,dtype=fp32"), slow("sp=2,ep=2,data=image")]
)
def test_row_46_forward_and_first_loss_are_bitwise_under_a_layout(session: ParitySession, text: str) -> None:
    outcome = session.judge(parse_cell(text))

    assert outcome.status is Status.PASSED, outcome.error
    assert outcome.comparison is not None
    assert outcome.comparison.expectation.bitwise == FORWARD
    forward = [tensor for tensor in outcome.comparison.tensors if tensor.entry.kind in FORWARD]
    assert {tensor.entry.kind for tensor in forward} >= {Kind.OUTPUT, Kind.LOGITS, Kind.LOSS}
    assert all(tensor.measure.is_bitwise for tensor in forward)


def test_row_76_pipeline_stages_have_the_bits_of_the_baseline_in_every_gradient(session: ParitySession) -> None:
    outcome = session.judge(parse_cell("pp=2,dtype=fp32"))

    assert outcome.status is Status.PASSED, outcome.error
    assert outcome.comparison is not None
    gradients = [t for t in outcome.comparison.tensors if t.entry.kind is Kind.PARAMETER_GRADIENT]
    assert gradients
    assert all(tensor.measure.is_bitwise for tensor in gradients)


def test_row_75_context_parallelism_is_within_tolerance_across_documents(session: ParitySession) -> None:
    outcome = session.judge(parse_cell("cp=2,dtype=fp32,data=packed"))

    assert outcome.status is Status.PASSED, outcome.error
    assert outcome.comparison is not None
    assert outcome.comparison.verdict is Verdict.WITHIN_TOLERANCE
    assert not outcome.comparison.expectation.bitwise


def test_a_cell_that_cannot_run_here_is_not_run_with_the_reason(session: ParitySession) -> None:
    (outcome,) = session.run((parse_cell("impl.kda=fla"),))

    assert outcome.status is Status.NOT_RUN
    assert "not for cpu" in outcome.reason


def test_a_layout_that_does_not_fit_is_not_run_in_a_matrix_and_refused_by_name(session: ParitySession) -> None:
    cell = parse_cell("sp=4")

    (outcome,) = session.run((cell,))

    assert outcome.status is Status.NOT_RUN
    assert "6 heads" in outcome.reason
    with pytest.raises(IllegalLayout):
        session.check(cell)


def test_a_fault_turns_the_verdict_and_is_followed_to_its_module(session: ParitySession) -> None:
    outcome = session.judge(parse_cell("dtype=fp32"), "bf16-decay")

    assert outcome.status is Status.FAILED
    assert outcome.divergence is not None
    assert outcome.divergence.module == "language_model.model.layers.2.self_attn.decay"
    assert outcome.divergence.origin is Origin.MODULE


@pytest.mark.slow
def test_a_fault_of_an_op_between_modules_shows_in_the_module_around_it(session: ParitySession) -> None:
    outcome = session.judge(parse_cell("cp=2,dtype=fp32"), "dropped-cp-state")

    assert outcome.status is Status.FAILED
    assert outcome.divergence is not None
    assert outcome.divergence.module == "language_model.model.layers.0.self_attn"
    assert outcome.divergence.origin is Origin.MODULE


def test_a_rank_that_fails_ends_its_cell_and_not_the_session(session: ParitySession) -> None:
    outcomes = [session.judge(parse_cell("dtype=fp32"), fault) for fault in ("no-such-fault", None)]

    assert [outcome.status for outcome in outcomes] == [Status.REFUSED, Status.PASSED]


@pytest.mark.slow
@pytest.mark.parametrize("level", [Level.OP, Level.LAYER])
def test_errors_stop_at_the_borders_of_a_level(session: ParitySession, level: Level) -> None:
    short = ParitySession(replace(session.options, level=level), session.pools)

    outcome = short.judge(parse_cell("dtype=fp32"), "latent-norm-eps")

    assert outcome.comparison is not None
    differing = [tensor.entry for tensor in outcome.comparison.tensors if not tensor.measure.is_bitwise]
    assert {entry.layer for entry in differing if entry.kind is Kind.OUTPUT} == {3}
    # the gradient that layer 3 hands back is that of layer 2's output
    assert {entry.layer for entry in differing} <= {2, 3, None}
