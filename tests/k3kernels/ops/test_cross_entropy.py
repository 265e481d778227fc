"""Cross entropy as losses, a sum and a count: one denominator, however the tokens are cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from k3kernels import K3Op

TOKENS, WIDTH, VOCABULARY, IGNORED = 23, 8, 40, -100


@pytest.fixture
def standard() -> K3Op:
    return K3Op("cross_entropy", "standard", "eager")


@pytest.fixture(params=["eager", "chunk_loss"])
def chunked(request: pytest.FixtureRequest) -> K3Op:
    return K3Op("cross_entropy", "chunked", request.param)


def make(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[5:15] = IGNORED
    return hidden, weight, labels


def test_the_sum_and_count_give_torchs_mean(standard: K3Op) -> None:
    hidden, weight, labels = make()
    logits = hidden @ weight.T

    total, _, count = standard(logits, labels)

    torch.testing.assert_close(total / count, torch.nn.functional.cross_entropy(logits, labels), rtol=1e-14, atol=0)
    assert count.item() == TOKENS - 10


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 23, 100])
def test_row_18_loss_and_gradients_are_those_of_full_logits(chunked: K3Op, standard: K3Op, chunk_size: int) -> None:
    hidden, weight, labels = make()
    leaves = [t.requires_grad_() for t in (hidden, weight)]

    total, _, count = chunked(*leaves, labels, chunk_size=chunk_size)
    grads = torch.autograd.grad(total / count, leaves)

    want, _, want_count = standard(hidden @ weight.T, labels)
    torch.testing.assert_close(total, want, rtol=1e-14, atol=0)
    assert torch.equal(count, want_count)
    for grad, wanted in zip(grads, torch.autograd.grad(want / want_count, leaves), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-14)


def test_row_18_parts_of_a_batch_share_one_denominator(chunked: K3Op) -> None:
    hidden, weight, labels = make()
    whole, _, count = chunked(hidden, weight, labels)

    parts = [chunked(hidden[rows], weight, labels[rows]) for rows in (slice(0, 7), slice(7, 14), slice(14, None))]

    torch.testing.assert_close(sum(total for total, *_ in parts), whole, rtol=1e-14, atol=0)
    assert sum(int(n) for *_, n in parts) == count


def test_row_18_a_chunk_without_counted_tokens_adds_nothing(chunked: K3Op) -> None:
    hidden, weight, labels = make()
    leaf = hidden.clone().requires_grad_()

    total, _, count = chunked(leaf, weight, labels, chunk_size=5)
    total.backward()

    assert leaf.grad is not None
    assert leaf.grad[5:15].eq(0).all()
    assert count.item() == TOKENS - 10


def test_row_18_nothing_counted_is_zero_with_zero_gradients(chunked: K3Op) -> None:
    hidden, weight, labels = make()
    leaf = hidden.clone().requires_grad_()

    total, _, count = chunked(leaf, weight, torch.full_like(labels, IGNORED))
    total.backward()

    assert (total.item(), count.item()) == (0.0, 0)
    assert leaf.grad is not None
    assert leaf.grad.eq(0).all()


def test_row_18_an_infinite_logit_of_an_ignored_token_is_harmless(chunked: K3Op) -> None:
    hidden, weight, labels = make()
    hidden[6] = torch.inf
    leaf = weight.clone().requires_grad_()

    total, *_ = chunked(hidden[torch.arange(TOKENS) != 6], leaf, labels[torch.arange(TOKENS) != 6])

    assert torch.isfinite(total)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_sum_is_that_of_the_tokens_losses_in_their_places(chunked: K3Op, dtype: torch.dtype) -> None:
    hidden, weight, labels = make(dtype)

    total, token_losses, _ = chunked(hidden.view(1, TOKENS, WIDTH), weight, labels[None], chunk_size=5)

    logits = (hidden @ weight.T).to(token_losses.dtype)
    want = torch.nn.functional.cross_entropy(logits, labels, reduction="none")[None]
    # the row counts of the products differ, and bfloat16 rounds what they sum in another order
    torch.testing.assert_close(token_losses, want, rtol=1e-14 if dtype == torch.float64 else 1e-2, atol=0)
    assert torch.equal(total, token_losses.sum())
    assert not token_losses.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_is_in_float32_on_rounded_logits(chunked: K3Op, dtype: torch.dtype) -> None:
    hidden, weight, labels = make(dtype)

    total, *_ = chunked(hidden, weight, labels, chunk_size=TOKENS)

    want = torch.nn.functional.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, want, rtol=1e-6, atol=0)  # float32 sums in another order


def test_leading_dims_are_kept(chunked: K3Op) -> None:
    hidden, weight, labels = make()
    leaf = hidden.view(1, TOKENS, WIDTH).clone().requires_grad_()

    total, *_ = chunked(leaf, weight, labels[None])
    total.backward()

    assert leaf.grad is not None
    assert leaf.grad.shape == (1, TOKENS, WIDTH)


def test_chunk_loss_keeps_no_logits_for_the_backward() -> None:
    hidden, weight, labels = make()
    kept: list[tuple[int, ...]] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(tuple(x.shape))
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        K3Op("cross_entropy", "chunked", "chunk_loss")(hidden.requires_grad_(), weight.requires_grad_(), labels)

    assert sorted(kept) == [(TOKENS, WIDTH), (VOCABULARY, WIDTH)]


def test_chunk_loss_makes_no_gradients_that_nobody_wants() -> None:
    hidden, weight, labels = make()
    kept: list[Tensor | None] = []
    op = K3Op("cross_entropy", "chunked", "chunk_loss")

    with torch.no_grad(), saved_tensors_hooks(lambda x: kept.append(x), lambda x: x):
        op(hidden.requires_grad_(), weight.requires_grad_(), labels)
    frozen_head = weight.detach()
    total, *_ = op(hidden, frozen_head, labels)
    total.backward()

    assert kept == []
    assert hidden.grad is not None
    assert frozen_head.grad is None


def test_what_does_not_belong_together_is_refused(chunked: K3Op, standard: K3Op) -> None:
    hidden, weight, labels = make()

    with pytest.raises(ValueError, match="do not match"):
        chunked(hidden, weight.T, labels)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        chunked(hidden, weight, labels, chunk_size=0)
    with pytest.raises(ValueError, match="need labels"):
        standard(hidden @ weight.T, labels[1:])
