"""Stages of a pipeline compute what one process computes: forward to the bit, gradients up to the order of sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3model.parallel.layout import Layout
from k3model.parallel.pipeline import one_forward_one_backward

Answers = list[dict[str, Any]]
Run = Callable[..., Answers]

# float64: a stream's gradients are summed in another order, and with other axes so are tokens. The tolerance leaves the
# rounding of such sums (1e-16 each) five decimal orders.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}

ONE = Layout()
# Blocks of two layers: layers 0-1, 2-3 and 4, KDA and MLA, experts from layer 1 on.
MODEL = {"fields": {"attn_res_block_size": 2}, "num_layers": 5}

TOO_SMALL = {"tied": True, "num_layers": 2, "fields": {"num_experts": 4}}


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 500, (batch, length), generator=torch.Generator().manual_seed(11))


def rows() -> dict[str, Tensor]:
    ids = tokens(4, 16)
    labels = ids.clone()
    labels[0, 9:], labels[1, 3:], labels[2] = -100, -100, -100
    return {"input_ids": ids, "labels": labels}


def packed(length: int) -> dict[str, Tensor]:
    ids = tokens(1, length)
    return {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([0, 3, length])}


def with_image() -> dict[str, Tensor]:
    ids = tokens(1, 8)
    ids[0, 3] = 505
    patches = torch.rand(16, 3, 14, 14, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return {"input_ids": ids, "labels": ids, "pixel_values": patches, "grid_thws": torch.tensor([[1, 4, 4]])}


def assert_gradients(answers: Answers, want: dict[str, Any]) -> None:
    gradients = {name: gradient for answer in answers for name, gradient in answer["gradients"].items()}
    assert set(gradients) == set(want["gradients"])
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, want["gradients"][name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
    for answer in answers:
        assert answer["missing"] == []
        torch.testing.assert_close(answer["norm"], want["norm"], **TOLERANCE)


def assert_same_forward(answers: Answers, want: dict[str, Any]) -> None:
    """Every rank has the loss, the last stage has losses and logits."""
    for answer in answers:
        assert (answer["loss"].item(), answer["num_labels"]) == (want["loss"].item(), want["num_labels"])
    for answer in answers[:-1]:
        assert answer["token_losses"] == ()
        assert set(answer["logits"]) == {None}
    for part in ("token_losses", "logits"):
        for got, wanted in zip(answers[-1][part], want[part], strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or torch.equal(got, wanted)


@pytest.mark.parametrize(
    "num_stages",
    [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, id="4 with one for the output alone")],
)
def test_row_76_stages_are_the_whole_network(run: Run, num_stages: int) -> None:
    layout = Layout(pp=num_stages)

    answers = run("step", layout, rows=rows(), model=MODEL, num_pieces=4, with_logits=True)

    (want,) = run("step", ONE, rows=rows(), model=MODEL, num_pieces=4, with_logits=True)
    assert_same_forward(answers, want)
    assert_gradients(answers, want)


def test_row_76_shapes_change_between_micro_batches_and_images_come_in_at_the_first_stage(run: Run) -> None:
    pieces, model = [[packed(12), with_image(), packed(7)]], {**MODEL, "vision": True}

    answers = run("step_of_own_rows", Layout(pp=2), rows_of_dp=pieces, model=model)

    (want,) = run("step_of_own_rows", ONE, rows_of_dp=pieces, model=model)
    assert_same_forward(answers, want)
    assert_gradients(answers, want)


def test_row_76_without_attention_residuals_the_running_sum_travels_alone(run: Run) -> None:
    model = {"fields": {"attn_res_block_size": None}, "num_layers": 3}

    answers = run("step", Layout(pp=2), rows=rows(), model=model)

    (want,) = run("step", ONE, rows=rows(), model=model)
    assert_same_forward(answers, want)
    assert_gradients(answers, want)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp=2, ep=2),
        Layout(pp=2, dp=2, shards_parameters=True),
        Layout(pp=2, sp=2),
        pytest.param(Layout(pp=2, cp=2), marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, sp=2, ep=2, shards_parameters=True), marks=pytest.mark.slow),
    ],
    ids=["ep2", "fsdp2", "sp2", "cp2", "sp2_ep2_fsdp1"],
)
def test_row_76_stages_go_with_every_other_axis(run: Run, layout: Layout) -> None:
    answers = run("step", layout, rows=rows(), model=MODEL, num_pieces=2, checkpointing=True)

    (want,) = run("step", ONE, rows=rows(), model=MODEL, num_pieces=2)
    for answer in answers:
        torch.testing.assert_close(answer["loss"], want["loss"], **TOLERANCE)
    assert_gradients(answers, want)


@pytest.mark.parametrize("trained", ["layers.4.", "layers.0.", "vision_tower"])
def test_row_69_a_stage_without_gradients_joins_the_norm(run: Run, trained: str) -> None:
    answers = run("step", Layout(pp=2), rows=rows(), model=MODEL, frozen_but=trained)

    (want,) = run("step", ONE, rows=rows(), model=MODEL, frozen_but=trained)
    assert_gradients(answers, want)


def test_f02_no_counted_label_is_zero_on_every_stage(run: Run) -> None:
    batch = rows()
    batch["labels"].fill_(-100)

    answers = run("step", Layout(pp=2), rows=batch, model=MODEL, num_pieces=2)

    assert [answer["loss"].item() for answer in answers] == [0.0, 0.0]
    assert not any(gradient.any() for answer in answers for gradient in answer["gradients"].values())


def test_row_77_every_stage_has_the_first_weights_of_the_whole_network(run: Run) -> None:
    model = {**MODEL, "vision": True}

    stages = run("names_of_stage", Layout(pp=4), model=model)

    (whole,) = run("names_of_stage", ONE, model=model)
    assert sum(len(stage) for stage in stages) == len(whole)
    assert {name: digest for stage in stages for name, digest in stage.items()} == whole


def test_stages_with_different_batches_are_told_so(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"micro-batches of \[\[\[4, 16\]\], \[\[4, 15\]\]\] rows and tokens"):
        run("other_batch_on_the_last_stage", Layout(pp=2), rows=rows(), model=MODEL)


def test_f07_f14_row_26_a_layout_that_cannot_be_is_refused_with_all_reasons_before_anything_changes(run: Run) -> None:
    asked = Layout(pp=2, sp=4, dp=2, ep=8, shards_parameters=True)

    (answer,) = run("refused_layout", ONE, asked=asked, model=TOO_SMALL)

    assert answer["unchanged"]
    assert answer["reasons"] == [
        "sp=4 does not divide the 6 heads of the KDA layers",
        "pp=2 puts the embedding and the head on two stages, but they are one parameter",
        "ep=8 does not divide the 4 experts",
    ]


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_a_stage_holds_no_more_micro_batches_than_stages_to_the_last(num_stages: int, num_micro_batches: int) -> None:
    for stage in range(num_stages):
        turns = list(one_forward_one_backward(num_stages, stage, num_micro_batches))

        held = [sum(1 if turn.is_forward else -1 for turn in turns[: n + 1]) for n in range(len(turns))]
        assert max(held) == min(num_stages - stage, num_micro_batches)
        for is_forward in (True, False):
            numbers = [turn.micro_batch for turn in turns if turn.is_forward == is_forward]
            assert numbers == list(range(num_micro_batches))
