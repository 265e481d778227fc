"""The short convolution: against torch's own, and across documents and calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu

from k3kernels import K3Op

CHANNELS, WIDTH = 6, 4


@pytest.fixture
def conv() -> K3Op:
    return K3Op("short_conv", "standard", "eager")


def make(tokens: int, *, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, CHANNELS, dtype=torch.float64, generator=generator)
    return x, torch.randn(CHANNELS, 1, WIDTH, dtype=torch.float64, generator=generator)


def torch_conv(x: Tensor, weight: Tensor, history: Tensor | None = None) -> Tensor:
    channels_first = x.transpose(1, 2)
    before = pad(channels_first, (WIDTH - 1, 0)) if history is None else torch.cat((history, channels_first), -1)
    return silu(conv1d(before, weight, groups=CHANNELS)).transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 70])
def test_it_is_torchs_depthwise_convolution_with_zeros_before(conv: K3Op, tokens: int) -> None:
    x, weight = make(tokens, batch=2)

    got, _ = conv(x, weight)

    torch.testing.assert_close(got, torch_conv(x, weight), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("tokens", [1, 2, 3, 10])
def test_e5_states_and_their_gradients_are_right_for_short_inputs(conv: K3Op, tokens: int) -> None:
    x, weight = make(tokens)
    state = make(WIDTH - 1, seed=3)[0].transpose(1, 2).contiguous()
    leaves = [t.clone().requires_grad_() for t in (x, weight, state)]

    y, final_state = conv(*leaves, output_final_state=True)
    got = torch.autograd.grad(y.square().sum() + final_state.pow(3).sum(), leaves)

    seen = torch.cat((leaves[2], leaves[0].transpose(1, 2)), -1)
    reference = torch_conv(leaves[0], leaves[1], leaves[2]).square().sum() + seen[..., -(WIDTH - 1) :].pow(3).sum()
    for grad, want in zip(got, torch.autograd.grad(reference, leaves), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_carried_state_continues_the_sequence(conv: K3Op, cut: int) -> None:
    x, weight = make(9)

    first, state = conv(x[:, :cut], weight, output_final_state=True)
    second, last = conv(x[:, cut:], weight, state, output_final_state=True)

    whole, whole_state = conv(x, weight, output_final_state=True)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-13, atol=1e-13)
    assert torch.equal(last, whole_state)
    assert torch.equal(last, x[:, -(WIDTH - 1) :].transpose(1, 2))


def test_e9_a_packed_document_does_not_see_its_neighbour(conv: K3Op) -> None:
    x, weight = make(12)

    packed, states = conv(x, weight, cu_seqlens=torch.tensor([0, 2, 2, 12]), output_final_state=True)

    # the sigmoid of a vector's tail may differ from that of its body in the last bit
    torch.testing.assert_close(packed[:, :2], conv(x[:, :2], weight)[0], rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(packed[:, 2:], conv(x[:, 2:], weight)[0], rtol=1e-15, atol=1e-15)
    assert torch.equal(states[1], torch.zeros(CHANNELS, WIDTH - 1, dtype=x.dtype))


def test_offsets_that_do_not_cover_the_row_are_refused(conv: K3Op) -> None:
    x, weight = make(12)

    with pytest.raises(ValueError, match="must go from 0 to 12"):
        conv(x, weight, cu_seqlens=torch.tensor([0, 11]))


def test_other_shapes_are_refused(conv: K3Op) -> None:
    x, weight = make(12)

    with pytest.raises(ValueError, match="needs a weight"):
        conv(x, weight[:, 0])
    with pytest.raises(ValueError, match=r"must be \(1, 6, 3\), got \(1, 6, 4\)"):
        conv(x, weight, x.new_zeros(1, CHANNELS, WIDTH))


def test_bfloat16_is_rounded_once_at_the_end(conv: K3Op) -> None:
    x, weight = make(20)
    x = x.bfloat16()

    got, _ = conv(x, weight.float())

    assert torch.equal(got, conv(x.float(), weight.float())[0].bfloat16())
