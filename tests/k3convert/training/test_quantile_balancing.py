"""The balanced bias is the quantile that gives every expert its share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3convert.training.quantile_balancing import NUM_BINS, Bins, balanced_bias, count_margins

NUM_TOKENS, NUM_EXPERTS, NUM_SELECTED = 4096, 16, 4


def skewed_scores() -> Tensor:
    """Half of the experts score high for nearly every token."""
    generator = torch.Generator().manual_seed(0)
    lean_E = torch.linspace(-1.5, 1.5, NUM_EXPERTS)
    return torch.sigmoid(torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator) + lean_E)


def load(scores_NE: Tensor, bias_E: Tensor) -> Tensor:
    """Tokens of every expert over the mean."""
    ids = (scores_NE + bias_E).topk(NUM_SELECTED, dim=-1).indices
    counts = torch.bincount(ids.flatten(), minlength=NUM_EXPERTS)
    return counts * NUM_EXPERTS / (NUM_TOKENS * NUM_SELECTED)


def step(scores_NE: Tensor, bias_E: Tensor) -> Tensor:
    bins = Bins.around(bias_E)
    return balanced_bias(count_margins(scores_NE, scores_NE + bias_E, NUM_SELECTED, bins), NUM_SELECTED, bins)


def test_a_few_steps_even_out_a_skewed_router() -> None:
    scores, bias = skewed_scores(), torch.zeros(NUM_EXPERTS)
    before = load(scores, bias)

    for _ in range(8):
        bias = step(scores, bias)

    after = load(scores, bias)
    assert before.max() > 2
    # a bin is 2e-3 wide, within which some 1 % of an expert's tokens lie
    assert after.max() < 1.05
    assert after.min() > 0.95


def test_the_bias_is_the_quantile_of_the_margins_less_its_mean() -> None:
    scores, bias = skewed_scores(), torch.zeros(NUM_EXPERTS)
    cutoff = scores.topk(NUM_SELECTED + 1, dim=-1).values[:, -1:]
    want = torch.quantile(cutoff - scores, NUM_SELECTED / NUM_EXPERTS, dim=0)

    found = step(scores, bias)

    # half a bin either way: the histogram knows no more
    torch.testing.assert_close(found, want - want.mean(), rtol=0, atol=2 / NUM_BINS)


def test_counts_of_micro_batches_add_up() -> None:
    scores, bias = skewed_scores(), torch.linspace(-0.1, 0.1, NUM_EXPERTS)
    bins = Bins.around(bias)

    whole = count_margins(scores, scores + bias, NUM_SELECTED, bins)
    parts = [count_margins(part, part + bias, NUM_SELECTED, bins) for part in scores.split(1000)]

    assert torch.equal(sum(parts), whole)
    assert whole.sum() == NUM_TOKENS * NUM_EXPERTS


def test_every_margin_has_a_bin() -> None:
    bias = torch.tensor([-0.3, 0.0, 0.3])
    bins = Bins.around(bias)
    scores = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])

    counts = count_margins(scores, scores + bias, 1, bins)

    assert counts.sum(1).tolist() == [3, 3, 3]


def test_the_mean_of_the_bias_is_zero() -> None:
    assert abs(float(step(skewed_scores(), torch.zeros(NUM_EXPERTS)).mean())) < 1e-6


def test_nothing_counted_has_no_quantile() -> None:
    bins = Bins.around(torch.zeros(3))

    with pytest.raises(ValueError, match="no token"):
        balanced_bias(torch.zeros(3, NUM_BINS, dtype=torch.int64), 1, bins)
