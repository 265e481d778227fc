"""Kimi Delta Attention: the chunked form against the token recurrence, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels import K3Op

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)
KEY, VALUE, HEADS = 16, 24, 2
LOWER_BOUND = -5.0
# float64 has 2e-16; sums run over at most 130 tokens, and a 64 x 64 triangular system is solved
TOLERANCE = 1e-12

Inputs = tuple[Tensor, ...]


@pytest.fixture
def chunk() -> K3Op:
    return K3Op("kda", "chunk", "eager")


@pytest.fixture
def recurrent() -> K3Op:
    return K3Op("kda", "recurrent", "eager")


def make(tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """q, k, v, g, beta with decays over the whole bounded range."""
    generator = torch.Generator().manual_seed(seed)
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    q, k = draw(batch, tokens, HEADS, KEY), draw(batch, tokens, HEADS, KEY)
    v = draw(batch, tokens, HEADS, VALUE)
    g = LOWER_BOUND * torch.sigmoid(2 * draw(batch, tokens, HEADS, KEY))
    beta = torch.sigmoid(draw(batch, tokens, HEADS))
    return tuple(x.to(dtype) for x in (q, k, v, g, beta))


def make_state(documents: int, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(documents, HEADS, KEY, VALUE, dtype=torch.float64, generator=generator)


def run(op: K3Op, inputs: Inputs, state: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
    """Outputs, final state and all gradients under fixed random gradients of both outputs."""
    leaves = [x.clone().requires_grad_() for x in (*inputs, *(() if state is None else (state,)))]
    out, final_state = op(*leaves, output_final_state=True, **kwargs)
    generator = torch.Generator().manual_seed(2)
    grad_outputs = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in (out, final_state)]
    grads = torch.autograd.grad((out, final_state), leaves, grad_outputs)
    names = ("out", "final_state", "grad_q", "grad_k", "grad_v", "grad_g", "grad_beta", "grad_state")
    return dict(zip(names, (out.detach(), final_state.detach(), *grads), strict=False))


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    for name, reference in want.items():
        assert torch.isfinite(got[name]).all(), name
        difference = (got[name] - reference).abs().max() / reference.abs().max().clamp(min=1)
        assert difference <= tolerance, f"{name}: {difference}"


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_row_89_chunks_equal_the_token_recurrence(tokens: int, with_state: bool, chunk: K3Op, recurrent: K3Op) -> None:
    inputs = make(tokens, batch=2)
    state = make_state(2) if with_state else None

    assert_same(run(chunk, inputs, state), run(recurrent, inputs, state))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 100, 500])
def test_e2_the_final_state_knows_no_padding_rows(tokens: int, chunk: K3Op, recurrent: K3Op) -> None:
    inputs = make(tokens)

    _, got = chunk(*inputs, output_final_state=True)

    torch.testing.assert_close(got, recurrent(*inputs, output_final_state=True)[1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("cu", [[0, 64, 130, 200], [0, 1, 2, 200], [0, 70, 133, 200], [0, 0, 63, 63, 200, 200]])
def test_packed_documents_equal_the_token_recurrence(cu: list[int], chunk: K3Op, recurrent: K3Op) -> None:
    inputs, state = make(200), make_state(len(cu) - 1)
    cu_seqlens = torch.tensor(cu)

    assert_same(run(chunk, inputs, state, cu_seqlens=cu_seqlens), run(recurrent, inputs, state, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("variant", ["chunk", "recurrent"])
def test_e9_a_packed_document_is_what_it_is_alone(variant: str) -> None:
    op = K3Op("kda", variant, "eager")
    inputs = make(150)

    packed, packed_states = op(*inputs, cu_seqlens=torch.tensor([0, 70, 150]), output_final_state=True)

    for n, span in enumerate((slice(0, 70), slice(70, 150))):
        alone, alone_state = op(*(x[:, span] for x in inputs), output_final_state=True)
        torch.testing.assert_close(packed[:, span], alone, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(packed_states[n : n + 1], alone_state, rtol=TOLERANCE, atol=TOLERANCE)


def test_documents_may_be_packed_in_any_order(chunk: K3Op) -> None:
    inputs = make(150)
    swapped = tuple(torch.cat((x[:, 70:], x[:, :70]), 1) for x in inputs)

    one, _ = chunk(*inputs, cu_seqlens=torch.tensor([0, 70, 150]))
    other, _ = chunk(*swapped, cu_seqlens=torch.tensor([0, 80, 150]))

    torch.testing.assert_close(torch.cat((other[:, 80:], other[:, :80]), 1), one, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("gate", [LOWER_BOUND, -1e-7, 0.0])
def test_gates_at_both_bounds_equal_the_token_recurrence(gate: float, chunk: K3Op, recurrent: K3Op) -> None:
    q, k, v, g, beta = make(130)
    inputs = (q, k, v, torch.full_like(g, gate), beta)

    assert_same(run(chunk, inputs), run(recurrent, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [LOWER_BOUND, -40.0, -1e4])
def test_e6_the_backward_is_finite_when_decays_underflow(gate: float, dtype: torch.dtype, chunk: K3Op) -> None:
    q, k, v, g, beta = make(64)
    inputs = (q.to(dtype), k.to(dtype), v.to(dtype), torch.full_like(g, gate).float(), beta.float())

    results = run(chunk, inputs)

    assert all(torch.isfinite(x).all() for x in results.values())


def test_near_duplicate_keys_equal_the_token_recurrence(chunk: K3Op, recurrent: K3Op) -> None:
    q, k, v, g, beta = make(130)
    inputs = (q, k[:, :1] + 1e-6 * k, v, 1e-3 * g, torch.full_like(beta, 0.9999))

    assert_same(run(chunk, inputs), run(recurrent, inputs))


def test_zero_keys_and_queries_have_finite_gradients(chunk: K3Op, recurrent: K3Op) -> None:
    q, k, v, g, beta = make(20)
    inputs = (torch.zeros_like(q), torch.zeros_like(k), v, g, beta)

    # the norm's slope at zero is 1000, which multiplies every rounding
    assert_same(run(chunk, inputs), run(recurrent, inputs), tolerance=1000 * TOLERANCE)


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_e1_a_carried_state_continues_the_sequence(cut: int, chunk: K3Op) -> None:
    inputs = make(130)

    first, state = chunk(*(x[:, :cut] for x in inputs), output_final_state=True)
    second, last_state = chunk(*(x[:, cut:] for x in inputs), state, output_final_state=True)

    whole, whole_state = chunk(*inputs, output_final_state=True)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(last_state, whole_state, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_decode_step_continues_a_chunked_prefill(chunk: K3Op, recurrent: K3Op) -> None:
    inputs = make(66)

    _, state = chunk(*(x[:, :65] for x in inputs), output_final_state=True)
    step, _ = recurrent(*(x[:, 65:] for x in inputs), state)

    torch.testing.assert_close(step, chunk(*inputs)[0][:, 65:], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("variant", ["chunk", "recurrent"])
@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 19], "must go from 0 to 20, got 0 to 19"),
        ([1, 20], "must go from 0 to 20, got 1 to 20"),
        ([0, 15, 10, 20], "must not fall"),
        ([0], "must be integers"),
    ],
)
def test_e7_offsets_that_do_not_cover_the_row_are_refused(variant: str, cu: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        K3Op("kda", variant, "eager")(*make(20), cu_seqlens=torch.tensor(cu))


def test_e7_offsets_describe_one_row(chunk: K3Op) -> None:
    with pytest.raises(ValueError, match="one packed row; the batch has 2"):
        chunk(*make(20, batch=2), cu_seqlens=torch.tensor([0, 20]))


def test_e7_repeated_calls_are_bitwise_equal(chunk: K3Op) -> None:
    inputs = make(150, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, 70, 70, 150])
    first = run(chunk, inputs, cu_seqlens=cu_seqlens)

    for _ in range(5):
        again = run(chunk, inputs, cu_seqlens=cu_seqlens)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("variant", ["chunk", "recurrent"])
def test_e7_an_empty_document_hands_its_state_through(variant: str) -> None:
    op, state = K3Op("kda", variant, "eager"), make_state(2)
    leaf = state.clone().requires_grad_()

    out, final_state = op(*make(20), leaf, cu_seqlens=torch.tensor([0, 0, 20]), output_final_state=True)
    (grad,) = torch.autograd.grad(final_state[0].sum(), leaf)

    assert out.shape[1] == 20
    assert torch.equal(final_state[0], state[0])
    assert torch.equal(grad[0], torch.ones_like(grad[0]))
    assert torch.equal(grad[1], torch.zeros_like(grad[1]))


@pytest.mark.parametrize("variant", ["chunk", "recurrent"])
def test_a_row_without_tokens_is_allowed(variant: str) -> None:
    state = make_state(2)

    out, final_state = K3Op("kda", variant, "eager")(*make(0, batch=2), state, output_final_state=True)

    assert out.shape == (2, 0, HEADS, VALUE)
    assert torch.equal(final_state, state)


@pytest.mark.parametrize("variant", ["chunk", "recurrent"])
def test_e3_grouped_heads_are_refused_with_every_mismatch(variant: str) -> None:
    q, k, v, g, beta = make(10)

    with pytest.raises(ValueError, match=r"v .*, g .*, beta .*"):
        K3Op("kda", variant, "eager")(q, k, v.repeat(1, 1, 2, 1), g.repeat(1, 1, 2, 1), beta.repeat(1, 1, 2))


@pytest.mark.parametrize("variant", ["chunk", "recurrent"])
def test_a_state_of_another_layout_is_refused(variant: str) -> None:
    with pytest.raises(ValueError, match="the initial state must be"):
        K3Op("kda", variant, "eager")(*make(10), make_state(1).mT)


def test_future_tokens_cannot_be_seen(chunk: K3Op) -> None:
    inputs = make(100, dtype=torch.float32)
    changed = tuple(torch.cat((x[:, :50], 0.5 * x[:, 50:]), 1) for x in inputs)

    one, other = chunk(*inputs)[0], chunk(*changed)[0]

    assert torch.equal(one[:, :50], other[:, :50])
    assert not torch.equal(one[:, 50:], other[:, 50:])


def test_without_a_scale_queries_are_scaled_by_their_width(chunk: K3Op) -> None:
    inputs = make(10)

    torch.testing.assert_close(chunk(*inputs)[0], KEY**0.5 * chunk(*inputs, scale=1 / KEY)[0], rtol=1e-14, atol=0)


def test_e8_views_of_one_fused_projection_are_read_with_their_own_strides(chunk: K3Op) -> None:
    q, k, _, g, beta = make(40)
    v = make(40, seed=5)[0]
    fused = torch.cat((q, k, v), -1)

    views = fused.split((KEY, KEY, KEY), -1)

    assert not views[1].is_contiguous()
    assert torch.equal(chunk(*views, g, beta)[0], chunk(q, k, v, g, beta)[0])


@pytest.mark.parametrize("gate", [None, LOWER_BOUND])
def test_in_float32_chunks_are_as_accurate_as_the_token_recurrence(
    gate: float | None, chunk: K3Op, recurrent: K3Op
) -> None:
    q, k, v, g, beta = make(200, dtype=torch.float32)
    inputs = (q, k, v, g if gate is None else torch.full_like(g, gate), beta)
    exact = run(recurrent, tuple(x.double() for x in inputs))

    # 8 roundings of 2 ** -24; a difference of two sums over a chunk would be off by 2e-5
    for name, got in run(chunk, inputs).items():
        assert (got - exact[name]).norm() <= 5e-7 * exact[name].norm(), name


@pytest.mark.parametrize(("variant", "rounds"), [("chunk", True), ("recurrent", False)])
def test_only_the_chunk_form_rounds_normalised_queries_and_keys(variant: str, rounds: bool) -> None:
    q, k, v, g, beta = make(1, dtype=torch.bfloat16)

    got, _ = K3Op("kda", variant, "eager")(q, k, v.float(), g.float(), beta.float())

    unit_q, unit_k = (x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if rounds:
        unit_q, unit_k = unit_q.bfloat16().float(), unit_k.bfloat16().float()
    # one token without a state: the output is its own value, weighted
    want = KEY**-0.5 * (unit_q * unit_k).sum(-1, keepdim=True) * beta.float()[..., None] * v.float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # float32 sums; one bfloat16 rounding is 2e-3


def test_the_state_stays_float32_for_bfloat16_input(chunk: K3Op) -> None:
    q, k, v, g, beta = make(30, dtype=torch.bfloat16)

    out, state = chunk(q, k, v, g.float(), beta.float(), output_final_state=True)

    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
