"""A step has one loss and one gradient for the global batch, whatever the layout and the micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from k3model.parallel.layout import Layout

Answers = list[dict[str, Any]]
Run = Callable[..., Answers]

# float64: sums over tokens are split between ranks and micro-batches, and matrix products have other numbers of rows.
# The tolerance leaves the rounding of such sums (1e-16 each) five decimal orders.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}

ONE = Layout()
LAYOUTS = {
    "one": ONE,
    "sp2": Layout(sp=2),
    "ep2": Layout(dp=2, ep=2),
    "fsdp2": Layout(dp=2, shards_parameters=True),
    "sp2_ep2_fsdp2": Layout(dp=2, sp=2, ep=2, shards_parameters=True),
}


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 500, (batch, length), generator=torch.Generator().manual_seed(11))


def rows() -> dict[str, Tensor]:
    """Four rows whose labels are counted unequally; the third has none."""
    ids = tokens(4, 16)
    labels = ids.clone()
    labels[0, 9:], labels[1, 3:], labels[2] = -100, -100, -100
    return {"input_ids": ids, "labels": labels}


def assert_equal_steps(answers: Answers, want: Mapping[str, Any]) -> None:
    for answer in answers:
        torch.testing.assert_close(answer["loss"], want["loss"], **TOLERANCE)
        torch.testing.assert_close(answer["norm"], want["norm"], **TOLERANCE)
        assert answer["num_labels"] == want["num_labels"]
        assert answer["missing"] == []
    assert set(answers[0]["gradients"]) == set(want["gradients"])
    for name, gradient in answers[0]["gradients"].items():
        torch.testing.assert_close(gradient, want["gradients"][name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def test_a_step_on_one_rank_is_the_networks_own_loss_and_backward(run: Run) -> None:
    (got,) = run("step", ONE, rows=rows())

    (want,) = run("plain_step", ONE, rows=rows())
    torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-14, atol=0)
    for name, gradient in want["gradients"].items():
        torch.testing.assert_close(got["gradients"][name], gradient, **TOLERANCE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_row_36_micro_batches_with_unequal_labels_are_the_whole_batch(run: Run, name: str) -> None:
    layout = LAYOUTS[name]

    answers = run("step", layout, rows=rows(), num_pieces=4 // layout.dp)

    assert_equal_steps(answers, run("step", ONE, rows=rows())[0])


@pytest.mark.parametrize("name", ["sp2_ep2_fsdp2", "ep2"])
def test_f02_a_batch_without_counted_labels_has_zero_loss_and_gradients_on_every_rank(run: Run, name: str) -> None:
    batch = rows()
    batch["labels"].fill_(-100)

    answers = run("step", LAYOUTS[name], rows=batch, num_pieces=2)

    assert [(answer["loss"].item(), answer["num_labels"].item()) for answer in answers] == [(0.0, 0)] * len(answers)
    assert not any(gradient.any() for gradient in answers[0]["gradients"].values())


@pytest.mark.parametrize(
    ("layout", "num_pieces"),
    [(ONE, 8), (Layout(sp=2), 2), (Layout(dp=2), 4), (Layout(dp=2, cp=2), 2)],
)
def test_equal_token_losses_have_one_sum_to_the_bit(run: Run, layout: Layout, num_pieces: int) -> None:
    generator = torch.Generator().manual_seed(5)
    losses = torch.rand(64, 100, generator=generator)

    answers = run("loss_of_tokens", layout, losses_RT=losses, num_pieces=num_pieces)

    want = run("loss_of_tokens", ONE, losses_RT=losses, num_pieces=1)[0]
    assert [answer.item() for answer in answers] == [want.item()] * layout.world_size
    torch.testing.assert_close(want.double(), losses.double().mean(), rtol=1e-6, atol=0)


def test_rows_of_other_lengths_on_every_rank_and_in_every_micro_batch(run: Run) -> None:
    lengths = ((24, 7), (9, 16))
    packed = [
        [{"input_ids": tokens(1, n), "labels": tokens(1, n), "cu_seqlens": torch.tensor([0, 5, n])} for n in of_rank]
        for of_rank in lengths
    ]

    answers = run("step_of_own_rows", LAYOUTS["fsdp2"], rows_of_dp=packed)

    one = run("step_of_own_rows", ONE, rows_of_dp=[packed[0] + packed[1]])
    assert_equal_steps(answers, one[0])
    assert [[loss.shape[1] for loss in answer["token_losses"]] for answer in answers] == [[24, 7], [9, 16]]


def test_images_on_one_rank_alone_leave_the_others_their_reductions(run: Run) -> None:
    text = {"input_ids": tokens(1, 12), "labels": tokens(1, 12)}
    ids = tokens(1, 8)
    ids[0, 3] = 505
    patches = torch.rand(16, 3, 14, 14, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    image = {"input_ids": ids, "labels": ids, "pixel_values": patches, "grid_thws": torch.tensor([[1, 4, 4]])}
    model = {"vision": True, "num_layers": 2}

    answers = run("step_of_own_rows", LAYOUTS["fsdp2"], rows_of_dp=[[text, text], [image, text]], model=model)

    one = run("step_of_own_rows", ONE, rows_of_dp=[[text, text, image, text]], model=model)
    assert_equal_steps(answers, one[0])


def test_logits_are_kept_where_asked_and_no_gradient_where_not(run: Run) -> None:
    answers = run("step", LAYOUTS["sp2"], rows=rows(), num_pieces=2, with_logits=True, backward=False)

    for answer in answers:
        assert [logits.shape[:2] for logits in answer["logits"]] == [(2, 8), (2, 8)]
        assert answer["gradients"] == {}
    assert run("step", LAYOUTS["sp2"], rows=rows(), backward=False)[0]["logits"] == (None,)


def test_gradients_of_a_step_before_are_refused(run: Run) -> None:
    with pytest.raises(RuntimeError, match="zero_grad"):
        run("second_step", LAYOUTS["sp2"], rows=rows())


def test_a_backward_pass_without_labels_is_refused(run: Run) -> None:
    with pytest.raises(RuntimeError, match="micro-batches without labels have no gradient: 0"):
        run("step", ONE, rows={"input_ids": tokens(1, 4)})


def test_unequally_many_micro_batches_are_refused_on_every_rank(run: Run) -> None:
    text = {"input_ids": tokens(1, 8), "labels": tokens(1, 8)}

    with pytest.raises(RuntimeError, match=r"ranks have \[2, 1\] micro-batches"):
        run("step_of_own_rows", LAYOUTS["fsdp2"], rows_of_dp=[[text, text], [text]])
