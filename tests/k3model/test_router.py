"""Routing by hand: bias, groups, renormalisation, precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3model.config import KimiK3Config, MoeConfig
from k3model.presets import tiny_config_dict
from k3model.text.router import Router


def router_of(scores: list[float], bias: list[float], **changes: Any) -> Router:
    """A router that gives the token ``[1, 0, ...]`` these scores."""
    base = KimiK3Config.from_dict(tiny_config_dict()).text.moe
    assert base is not None
    moe: MoeConfig = replace(base, num_experts=len(scores), **{"num_experts_per_token": 2} | changes)
    router = Router(moe, hidden_size=4)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.logit(torch.tensor(scores))
        router.e_score_correction_bias.copy_(torch.tensor(bias))
    return router


TOKEN = torch.tensor([[1.0, 0.0, 0.0, 0.0]])


def routed(router: Router) -> dict[int, float]:
    ids, weights = router(TOKEN)
    return dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))


def test_row_59_the_bias_flips_the_choice_and_not_the_weight() -> None:
    got = routed(router_of([0.9, 0.8, 0.2, 0.1], [0.0, -0.7, 0.0, 0.5]))

    assert got == pytest.approx({0: 0.9, 3: 0.1}, rel=1e-6)


def test_weights_are_renormalised_then_scaled() -> None:
    got = routed(router_of([0.6, 0.2, 0.1, 0.1], [0.0] * 4, routed_scaling_factor=2.5))

    assert got == pytest.approx({0: 0.75 * 2.5, 1: 0.25 * 2.5}, rel=1e-6)


def test_without_renormalisation_the_scores_are_the_weights() -> None:
    got = routed(router_of([0.6, 0.2, 0.1, 0.1], [0.0] * 4, renormalize=False))

    assert got == pytest.approx({0: 0.6, 1: 0.2}, rel=1e-6)


def test_a_single_expert_keeps_its_score() -> None:
    got = routed(router_of([0.6, 0.2], [0.0] * 2, num_experts_per_token=1))

    assert got == pytest.approx({0: 0.6}, rel=1e-6)


def test_groups_count_by_their_two_best_experts() -> None:
    # Alone, expert 0 is best; its group's second is poor, so the other group wins.
    got = routed(router_of([0.9, 0.1, 0.7, 0.6], [0.0] * 4, num_groups=2, topk_group=1))

    assert set(got) == {2, 3}


def test_groups_choose_by_biased_scores() -> None:
    got = routed(router_of([0.9, 0.1, 0.7, 0.6], [0.0, 0.5, 0.0, 0.0], num_groups=2, topk_group=1))

    assert set(got) == {0, 1}


def test_softmax_scores_sum_to_one_over_all_experts() -> None:
    router = router_of([0.5, 0.5, 0.5, 0.5], [0.0] * 4, score_function="softmax", renormalize=False)

    assert list(routed(router).values()) == pytest.approx([0.25, 0.25])


def test_equal_scores_route_alike_every_time() -> None:
    router = router_of([0.5] * 8, [0.0] * 8)

    first, second = router(TOKEN.expand(100, 4)), router(TOKEN.expand(100, 4))

    assert torch.equal(first[0], second[0])


def test_a_bf16_token_is_scored_in_float32() -> None:
    router = router_of([0.6, 0.2, 0.1, 0.1], [0.0] * 4).to(torch.bfloat16)

    _, weights = router(TOKEN.bfloat16())

    assert weights.dtype == torch.float32


def test_the_gradient_reaches_the_weight_and_not_the_bias() -> None:
    router = router_of([0.9, 0.8, 0.2, 0.1], [0.0] * 4)
    x = TOKEN.clone().requires_grad_()

    weights: Tensor = router(x)[1]
    weights[0, 0].backward()

    assert router.weight.grad is not None
    assert float(router.weight.grad.abs().sum()) > 0
    assert not router.e_score_correction_bias.requires_grad
