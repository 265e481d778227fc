"""Divergences of predictions against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from k3convert.parity import logit_agreement
from k3convert.parity.cells import Precision
from k3convert.parity.logit_agreement import compare_logits


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_equal_logits_diverge_by_nothing() -> None:
    value = logits(2, 8, 50)

    found = compare_logits(value.float(), value.float(), value.float(), Precision.FP32)
    assert found.candidate.max_kl == found.candidate.max_reverse_kl == 0
    assert found.candidate.top_1 == found.candidate.top_5 == 1
    assert found.candidate.nll_delta is None
    assert found.num_tokens == 16
    assert not found.is_outside


def test_divergences_are_torchs_own() -> None:
    golden, candidate = logits(2, 100, 50), logits(2, 100, 50, seed=1)

    found = compare_logits(candidate, golden, golden, Precision.FP32).candidate
    p, q = (torch.distributions.Categorical(logits=v.view(-1, 50)) for v in (golden, candidate))
    ahead, reverse = (torch.distributions.kl_divergence(*pair) for pair in ((p, q), (q, p)))
    # sums in another order
    assert found.mean_kl == pytest.approx(float(ahead.mean()), rel=1e-9)
    assert found.max_kl == pytest.approx(float(ahead.max()), rel=1e-9)
    assert found.p99_kl == pytest.approx(float(ahead.sort().values[197]), rel=1e-9)
    assert found.mean_reverse_kl == pytest.approx(float(reverse.mean()), rel=1e-9)
    assert found.max_reverse_kl == pytest.approx(float(reverse.max()), rel=1e-9)


def test_shares_of_first_choices_are_counted() -> None:
    golden = torch.eye(10)[:4] * 5 + torch.arange(10) / 100
    candidate = golden.clone()
    candidate[0, 0], candidate[0, 9] = 0.0, 5.0

    found = compare_logits(candidate, golden, golden, Precision.BF16).candidate
    assert found.top_1 == 0.75
    # the first token's five were 0, 9, 8, 7, 6, and are 9, 8, 7, 6, 5
    assert found.top_5 == pytest.approx(0.95)


def test_a_constant_added_to_all_logits_of_a_token_changes_no_prediction() -> None:
    golden = logits(4, 50)

    found = compare_logits(golden + torch.arange(4.0)[:, None], golden, golden, Precision.FP64)
    assert found.candidate.max_kl < 1e-14  # the rounding of the sum


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    golden, candidate = logits(3, 7, 50), logits(3, 7, 50, seed=1)
    whole = compare_logits(candidate, golden, golden, Precision.FP32)

    monkeypatch.setattr(logit_agreement, "SLICE_VALUES", 150)
    assert compare_logits(candidate, golden, golden, Precision.FP32) == whole


def test_the_difference_of_losses_is_a_mean_over_counted_labels() -> None:
    value = logits(1, 4, 10)
    losses = (
        torch.tensor([1.5, 0.0, 2.0, 0.0]),
        torch.tensor([1.0, 0.0, 2.0, 0.0]),
        torch.tensor([1.0, 0.0, 2.0, 0.0]),
    )

    found = compare_logits(value, value, value, Precision.FP32, losses=losses)
    assert found.candidate.nll_delta == 0.25
    assert found.baseline.nll_delta == 0.0


@pytest.mark.parametrize(("noise", "names"), [(0.01, set()), (0.3, {"ceiling.bf16.mean_kl", "ceiling.bf16.p99_kl"})])
def test_limits_are_those_of_the_dtype_where_the_baseline_is_better(noise: float, names: set[str]) -> None:
    golden = logits(4, 100, 50)
    candidate = golden + noise * logits(4, 100, 50, seed=1) / 3

    found = compare_logits(candidate, golden, golden, Precision.BF16)
    assert {gate.limit for gate in found.gates if gate.is_beyond} - {"top_1"} == names


def test_a_baseline_that_diverges_gives_its_candidates_room() -> None:
    golden = logits(4, 100, 50)
    baseline = golden + 0.3 * logits(4, 100, 50, seed=1) / 3
    equal = golden + 0.3 * logits(4, 100, 50, seed=2) / 3
    worse = golden + 0.9 * logits(4, 100, 50, seed=2) / 3

    assert not compare_logits(equal, baseline, golden, Precision.BF16).is_outside
    assert compare_logits(worse, baseline, golden, Precision.BF16).is_outside


def test_predictions_of_another_first_token_are_outside() -> None:
    golden = torch.zeros(400, 10)
    golden[:, 0], golden[:, 1] = 1e-3, 0.9e-3
    candidate = golden.clone()
    candidate[:80, 1] = 1.1e-3

    found = compare_logits(candidate, golden, golden, Precision.BF16)
    assert {gate.limit for gate in found.gates if gate.is_beyond} == {"top_1"}


def test_logits_that_are_not_numbers_are_outside() -> None:
    golden = logits(4, 10)
    candidate = golden.clone()
    candidate[0, 0] = math.nan

    assert compare_logits(candidate, golden, golden, Precision.BF16).is_outside
