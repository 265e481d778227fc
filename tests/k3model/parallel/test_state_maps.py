"""What a rank's tokens do to a state, as one affine map: that it is what the recurrence does to any state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels import using
from k3kernels.selection import OpsConfig
from k3model.config import KimiK3Config
from k3model.parallel.context import _state_map
from k3model.presets import release_config_dict, tiny_config_dict
from k3model.text.kda_attention import KdaAttention, KdaInputs


def attention_of(raw: dict[str, Any], ops: dict[str, str], *, num_heads: int) -> KdaAttention:
    """A layer's attention, of which the recurrence alone is used: no weight is large."""
    raw["text_config"]["linear_attn_config"]["num_heads"] = num_heads
    raw["vision_config"] = None
    text = KimiK3Config.from_dict(raw).text
    assert text.kda is not None
    with using(OpsConfig.of(ops)):
        return KdaAttention(text.kda, 8, text.rms_norm_eps)


def inputs_of(batch: int, tokens: int, heads: int, channels: int) -> KdaInputs:
    generator = torch.Generator().manual_seed(8)
    q, k, v, z = (
        torch.randn(batch, tokens, heads, channels, dtype=torch.float64, generator=generator) for _ in range(4)
    )
    beta = torch.rand(batch, tokens, heads, dtype=torch.float64, generator=generator)
    return KdaInputs(q, k, v, -5 * torch.sigmoid(z - 3), beta)


@pytest.mark.parametrize("tokens", [1, 63, 150])
def test_a_state_map_is_what_the_recurrence_does_to_any_state(tokens: int) -> None:
    attention = attention_of(tiny_config_dict(), {}, num_heads=3)
    inputs = inputs_of(2, tokens, 3, 32)
    state = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(9))

    left, transition = _state_map(attention, inputs, 0)

    _, want = attention.recur(inputs, None, state, output_final_state=True)
    # float64, and the same chunks: products in another grouping
    torch.testing.assert_close(left + transition @ state, want, rtol=1e-12, atol=1e-12)


def test_a_state_map_begins_where_the_open_document_does() -> None:
    attention = attention_of(tiny_config_dict(), {}, num_heads=3)
    inputs = inputs_of(1, 40, 3, 32)

    maps = _state_map(attention, inputs, 15)

    alone = _state_map(attention, KdaInputs(*(x[:, 15:] for x in inputs)), 0)
    assert all(torch.equal(mine, want) for mine, want in zip(maps, alone, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [50, 64, 300])
def test_the_library_computes_state_maps_at_the_released_width(tokens: int) -> None:
    """Values are twice as wide as keys there: 256 channels beside 128."""
    inputs = inputs_of(2, tokens, 4, 128)
    results = []
    for ops, dtype in (({}, torch.float64), ({"chunk_kda": "fla"}, torch.bfloat16)):
        attention = attention_of(release_config_dict(), ops, num_heads=4)
        # the decay stays in float32, as in the network
        leaves = KdaInputs(
            *(x.to("cuda", dtype if x is not inputs.g else torch.promote_types(dtype, torch.float32)) for x in inputs)
        )
        results.append(map_and_gradients(attention, KdaInputs(*(x.requires_grad_() for x in leaves))))

    for mine, want in zip(results[1], results[0], strict=True):
        # bf16: operands of a chunk's products are rounded to 2 ** -9, and gradients pass through several of them
        assert float((mine.double() - want).norm() / want.norm()) < 3e-2


def map_and_gradients(attention: KdaAttention, inputs: KdaInputs) -> list[Tensor]:
    """The map, and the gradients of a weighted sum of it for k, v, g and beta; q has no part in it."""
    left, transition = _state_map(attention, inputs, 0)
    weights = torch.linspace(-1, 1, left.shape[-1], dtype=left.dtype, device=left.device)
    ((left * weights).sum() + (transition * weights).sum()).backward()
    gradients = [x.grad for x in inputs[1:] if x.grad is not None]
    return [left.detach(), transition.detach(), *gradients]
