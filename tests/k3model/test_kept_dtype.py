"""What is stored in float32 stays float32, whatever the network is cast to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from k3model.config import KimiK3Config
from k3model.kept_dtype import KeptDtype
from k3model.network import KimiK3ForConditionalGeneration
from k3model.presets import tiny_config_dict

Build = Callable[..., KimiK3ForConditionalGeneration]
Cast = Callable[[nn.Module], nn.Module]

KEPT = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias")
# A value that bf16 cannot hold.
FINE = 1.0 + 2.0**-20


def is_kept(name: str) -> bool:
    return name.endswith(KEPT)


@pytest.fixture
def small() -> KimiK3ForConditionalGeneration:
    return KimiK3ForConditionalGeneration.from_config(KimiK3Config.from_dict(tiny_config_dict()).with_num_layers(2))


@pytest.mark.parametrize(
    "cast",
    [
        lambda network: network.to(torch.bfloat16),
        lambda network: network.bfloat16(),
        lambda network: network.half(),
        lambda network: network.to("cpu", torch.bfloat16),
        lambda network: network.type(torch.bfloat16),
        lambda network: network.bfloat16().float(),
        lambda network: network.language_model.bfloat16() and network,
    ],
)
def test_e11_a_cast_leaves_the_kept_tensors_and_their_bits(small: KimiK3ForConditionalGeneration, cast: Cast) -> None:
    with torch.no_grad():
        for name, tensor in small.state_dict().items():
            if is_kept(name):
                tensor.fill_(FINE)

    cast(small)

    kept = {name: tensor for name, tensor in small.state_dict().items() if is_kept(name)}
    assert len(kept) == 2 * 6 + 1
    for name, tensor in kept.items():
        assert tensor.dtype == torch.float32, name
        assert bool((tensor == FINE).all()), name


def test_row_92_everything_else_is_cast(small: KimiK3ForConditionalGeneration) -> None:
    small.to(torch.bfloat16)

    others = {tensor.dtype for name, tensor in small.state_dict().items() if not is_kept(name)}
    assert others == {torch.bfloat16}


@pytest.mark.parametrize("build", [KimiK3ForConditionalGeneration.empty, KimiK3ForConditionalGeneration.from_config])
def test_a_network_built_in_bf16_keeps_them_too(build: Callable[..., KimiK3ForConditionalGeneration]) -> None:
    config = KimiK3Config.from_dict(tiny_config_dict()).with_num_layers(2)

    network = build(config, dtype=torch.bfloat16)

    dtypes = {name: tensor.dtype for name, tensor in network.state_dict().items()}
    assert all(dtype == (torch.float32 if is_kept(name) else torch.bfloat16) for name, dtype in dtypes.items())


def test_gradients_of_kept_parameters_stay_float32_and_move_with_them() -> None:
    class Kept(KeptDtype):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), FINE))

    kept = Kept()
    kept.weight.grad = torch.full((2,), FINE)

    kept.to(torch.bfloat16)

    assert kept.weight.grad is not None
    assert kept.weight.grad.dtype == torch.float32
    assert bool((kept.weight.grad == FINE).all())


def test_kept_tensors_move_between_devices(small: KimiK3ForConditionalGeneration) -> None:
    moved = small.to("meta", torch.bfloat16)

    assert all(tensor.is_meta for tensor in moved.state_dict().values())
    assert moved.state_dict()["language_model.model.layers.0.self_attn.decay.A_log"].dtype == torch.float32


def test_nothing_else_overrides_a_cast(small: KimiK3ForConditionalGeneration) -> None:
    overriding = {
        kind.__name__
        for module in small.modules()
        for kind in type(module).__mro__
        if kind.__module__.startswith("k3model")
        for name in ("to", "_apply", "half", "bfloat16", "float", "type")
        if name in vars(kind)
    }

    assert overriding == {"KeptDtype"}


def test_e17_the_correction_bias_is_the_only_buffer(small: KimiK3ForConditionalGeneration) -> None:
    small.train()
    ids = torch.arange(6)[None]
    small(ids)
    before = {name: buffer.dtype for name, buffer in small.named_buffers()}

    small.to(torch.bfloat16)
    small(ids)

    after = {name: buffer.dtype for name, buffer in small.named_buffers()}
    assert before == after
    assert before == {"language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias": torch.float32}


def test_e11_a_bf16_network_routes_with_the_bias_of_the_file(small: KimiK3ForConditionalGeneration) -> None:
    gate = small.language_model.model.layers["1"].feed_forward.gate
    x = torch.zeros(1, 128)
    # Scores are all 0.5; these biases differ by less than bf16 can tell apart near 1.
    bias = 1.0 + torch.arange(16) * 2.0**-20
    with torch.no_grad():
        gate.e_score_correction_bias.copy_(bias)

    small.to(torch.bfloat16)

    ids: Tensor = gate(x.bfloat16())[0]
    assert sorted(ids[0].tolist()) == [12, 13, 14, 15]


def test_e12_a_network_in_bf16_counts_nothing_in_a_bf16_buffer(
    tiny_network: Callable[..., KimiK3ForConditionalGeneration],
) -> None:
    network = tiny_network().bfloat16()

    low = {name: buffer.dtype for name, buffer in network.named_buffers() if buffer.dtype == torch.bfloat16}

    assert not low
