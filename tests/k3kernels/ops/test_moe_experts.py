"""The routed experts: against a dense masked sum over all experts, and against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels import K3Op

BETA, LINEAR_BETA = 4.0, 25.0
IMPLS = ("eager", "grouped_mm")
TOKENS, EXPERTS, LATENT, INTERMEDIATE, SLOTS = 13, 6, 16, 24, 3


@pytest.fixture(params=IMPLS)
def experts(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    op = K3Op("moe_experts", "situ", request.param)
    return lambda *args: op(*args, beta=BETA, linear_beta=LINEAR_BETA)


def make(ids: Tensor, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> list[Tensor]:
    """x, ids, weights, w1, w3, w2."""
    generator = torch.Generator().manual_seed(seed)
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    weights = torch.rand(ids.shape, generator=generator)
    return [
        draw(len(ids), LATENT),
        ids,
        weights.double() if dtype == torch.float64 else weights,
        draw(EXPERTS, INTERMEDIATE, LATENT) / 4,
        draw(EXPERTS, INTERMEDIATE, LATENT) / 4,
        draw(EXPERTS, LATENT, INTERMEDIATE) / 5,
    ]


def spread_ids() -> Tensor:
    """Different experts for a token; the last expert has no token."""
    generator = torch.Generator().manual_seed(7)
    return torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:SLOTS] for _ in range(TOKENS)])


ROUTINGS = {
    "spread": spread_ids(),
    "all to one": torch.full((TOKENS, 1), 2),
    "one slot": spread_ids()[:, :1],
    "same expert twice": torch.tensor([[1, 1, 4]] * 3),
    "every expert": torch.arange(EXPERTS).repeat(5, 1),
    "one token": torch.tensor([[5, 0, 3]]),
}


def dense(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """Every expert on every token, masked by the routing."""
    gate, up = torch.einsum("nd,eid->nei", x, w1), torch.einsum("nd,eid->nei", x, w3)
    hidden = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate) * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)
    outputs = torch.einsum("nei,edi->ned", hidden, w2)
    share = torch.zeros(len(x), EXPERTS, dtype=weights.dtype).scatter_add(1, ids, weights)
    return (share[..., None] * outputs).sum(1)


def run(op: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of x, weights, w1, w3, w2."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    out = op(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_row_83_experts_equal_a_dense_masked_sum(
    experts: Callable[..., Tensor], routing: str, dtype: torch.dtype, tolerance: float
) -> None:
    inputs = make(ROUTINGS[routing], dtype)

    got = run(experts, inputs)

    want = run(dense, [t.double() if t.is_floating_point() else t for t in inputs])
    for mine, reference in zip(got, want, strict=True):
        # relative norm: a handful of roundings, of 2 ** -24 or of 2 ** -9
        assert (mine.double() - reference).norm() <= tolerance * reference.norm()


def test_row_83_the_eager_experts_equal_it_in_float64() -> None:
    op = K3Op("moe_experts", "situ", "eager")
    inputs = make(ROUTINGS["spread"], torch.float64)

    got = run(lambda *args: op(*args, beta=BETA, linear_beta=LINEAR_BETA), inputs)

    for mine, reference in zip(got, run(dense, inputs), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


def test_row_67_weights_multiply_rounded_outputs_after_the_down_projection(experts: Callable[..., Tensor]) -> None:
    x, ids, weights, w1, w3, w2 = make(ROUTINGS["spread"], torch.bfloat16)

    got = experts(x, ids, weights, w1, w3, w2)

    alone = [experts(x, ids[:, s : s + 1], torch.ones(TOKENS, 1), w1, w3, w2) for s in range(SLOTS)]
    total = torch.zeros(TOKENS, LATENT)
    for s, y in enumerate(alone):
        total += y.float() * weights[:, s : s + 1]
    assert torch.equal(got, total.bfloat16())


def test_row_67_the_sum_runs_in_slot_order_whatever_the_experts(experts: Callable[..., Tensor]) -> None:
    x, ids, weights, w1, w3, w2 = make(ROUTINGS["spread"], torch.bfloat16)
    renamed = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(3))
    back = renamed.argsort()

    moved = experts(x, renamed[ids], weights, w1[back], w3[back], w2[back])

    assert torch.equal(moved, experts(x, ids, weights, w1, w3, w2))


def test_an_expert_without_tokens_has_a_gradient_of_zeros(experts: Callable[..., Tensor]) -> None:
    _, _, _, *weight_grads = run(experts, make(ROUTINGS["spread"]))

    assert all(grad[-1].eq(0).all() for grad in weight_grads)
    assert all(grad[:-1].ne(0).any() for grad in weight_grads)


def test_a_batch_without_tokens_is_allowed(experts: Callable[..., Tensor]) -> None:
    got = run(experts, make(torch.empty(0, SLOTS, dtype=torch.int64)))

    assert got[0].shape == (0, LATENT)
    assert all(grad.eq(0).all() for grad in got[1:])


def test_expanded_gradients_are_made_contiguous(experts: Callable[..., Tensor]) -> None:
    x, *rest = make(ROUTINGS["spread"])
    x.requires_grad_()

    experts(x, *rest).sum().backward()  # the gradient of a sum has stride 0

    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_frozen_weights_get_no_gradient(experts: Callable[..., Tensor]) -> None:
    x, ids, weights, w1, w3, w2 = make(ROUTINGS["spread"])
    x.requires_grad_()
    w3.requires_grad_()

    experts(x, ids, weights, w1, w3, w2).sum().backward()

    assert w3.grad is not None
    assert (w1.grad, w2.grad, weights.grad) == (None, None, None)


def test_each_matrix_has_one_gradient_stack_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[tuple[int, ...]] = []
    original = torch.zeros_like

    def counting(x: Tensor, **kwargs: Any) -> Tensor:
        allocated.append(tuple(x.shape))
        return original(x, **kwargs)

    inputs = make(ROUTINGS["every expert"])
    leaves = [t.requires_grad_(t.is_floating_point()) for t in inputs]
    out = K3Op("moe_experts", "situ", "eager")(*leaves, beta=BETA, linear_beta=LINEAR_BETA)
    monkeypatch.setattr(torch, "zeros_like", counting)
    out.sum().backward()

    assert [shape for shape in allocated if len(shape) == 3] == [
        (EXPERTS, INTERMEDIATE, LATENT),
        (EXPERTS, INTERMEDIATE, LATENT),
        (EXPERTS, LATENT, INTERMEDIATE),
    ]


@pytest.mark.parametrize("bad", [-1, EXPERTS, EXPERTS + 5])
def test_an_id_that_names_no_expert_is_refused(experts: Callable[..., Tensor], bad: int) -> None:
    ids = ROUTINGS["spread"].clone()
    ids[3, 1] = bad

    with pytest.raises(ValueError, match=rf"1 ids name no expert of 0..{EXPERTS - 1}, e.g. \[{bad}\]"):
        experts(*make(ids))


def test_every_mismatch_is_named(experts: Callable[..., Tensor]) -> None:
    x, ids, weights, w1, w3, w2 = make(ROUTINGS["spread"])

    with pytest.raises(ValueError, match=r"w2 \(6, 16, 24\); x must be .*; 13 tokens with ids .*; .* one dtype"):
        experts(x[:, :8].bfloat16(), ids[:2], weights, w1, w3, w2[:, :, :8])


def test_widths_that_grouped_mm_cannot_take_are_refused_with_the_reason() -> None:
    op = K3Op("moe_experts", "situ", "grouped_mm")
    x, ids, weights, w1, w3, w2 = make(ROUTINGS["spread"], torch.bfloat16)

    with pytest.raises(ValueError, match="a row of w2 has 40 bytes, not a multiple of 16"):
        op(
            x,
            ids,
            weights,
            w1[:, :20].contiguous(),
            w3[:, :20].contiguous(),
            w2[..., :20].contiguous(),
            beta=BETA,
            linear_beta=LINEAR_BETA,
        )
    with pytest.raises(ValueError, match="w1 is not contiguous"):
        op(x, ids, weights, w1.mT.contiguous().mT, w3, w2, beta=BETA, linear_beta=LINEAR_BETA)
    with pytest.raises(ValueError, match="float64 is not supported"):
        op(*make(ROUTINGS["spread"], torch.float64), beta=BETA, linear_beta=LINEAR_BETA)


def test_e18_a_nan_token_stays_in_its_own_row(experts: Callable[..., Tensor]) -> None:
    x, *rest = make(ROUTINGS["spread"])
    x[4, 2] = torch.nan

    got = experts(x, *rest)

    assert got.isnan().any(-1).tolist() == [n == 4 for n in range(TOKENS)]
