"""What the generated tensors hold: every hard case, and nothing that makes a forward pass overflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from k3convert.numerics.mxfp4_decode import decode_float32
from k3convert.synthesis import make_checkpoint
from k3convert.synthesis.expert_blocks import LARGEST_LIVE_SCALE, expert_matrix
from k3convert.synthesis.random_stream import random_stream

PREFIX = "language_model.model."


@pytest.fixture(scope="module")
def values(tiny: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in tiny.glob("*.safetensors"):
        found |= load_file(path)
    return found


def expert_pairs(values: dict[str, torch.Tensor]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for name, tensor in values.items():
        if name.endswith("weight_packed"):
            yield tensor.numpy(), values[name.replace("_packed", "_scale")].numpy()


def largest_codes(packed: np.ndarray) -> np.ndarray:
    blocks = packed.reshape(-1, 16)
    largest: np.ndarray = np.maximum(blocks & 0x7, blocks >> 4 & 0x7).max(axis=1)
    return largest


def test_every_layer_has_blocks_of_every_largest_code_and_minus_zeros(values: dict[str, torch.Tensor]) -> None:
    for layer in range(1, 13):
        prefix = f"{PREFIX}layers.{layer}."
        packed = np.concatenate(
            [t.numpy().ravel() for n, t in values.items() if n.startswith(prefix) and n.endswith("weight_packed")]
        )

        assert set(largest_codes(packed)) == set(range(8))
        assert (packed & 0xF == 8).any()
        assert (packed >> 4 == 8).any()


def test_all_zero_blocks_come_with_and_without_minus_zeros(values: dict[str, torch.Tensor]) -> None:
    blocks = np.concatenate([packed.reshape(-1, 16) for packed, _ in expert_pairs(values)])
    zeros = blocks[largest_codes(blocks) == 0]

    assert (zeros == 0).all(axis=1).any()
    assert (zeros == 0x88).any()


def test_live_blocks_have_scales_up_to_124_most_of_them_117_to_123(values: dict[str, torch.Tensor]) -> None:
    pairs = list(expert_pairs(values))
    scale = np.concatenate([scale.ravel() for _, scale in pairs])
    is_live = np.concatenate([largest_codes(packed) > 0 for packed, _ in pairs])

    live, idle = scale[is_live], scale[~is_live]

    assert set(live) == set(range(LARGEST_LIVE_SCALE + 1))
    assert np.isin(live, range(117, 124)).mean() > 0.85
    assert idle.max() > 250
    assert scale.max() <= 254


def test_expert_weights_are_as_large_as_trained_ones(values: dict[str, torch.Tensor]) -> None:
    weights = []
    for packed, scale in expert_pairs(values):
        weight = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=np.float32)
        decode_float32(packed, scale, weight)
        weights.append(weight.ravel())

    every_weight = np.concatenate(weights)
    assert np.abs(every_weight).max() == 6 * 2.0 ** (LARGEST_LIVE_SCALE - 127)
    assert 0.02 < every_weight.std() < 0.04


@pytest.mark.parametrize(
    ("leaf", "std"),
    [
        ("layers.1.self_attn.q_proj.weight", 0.02),
        ("layers.3.self_attn.q_b_proj.weight", 0.02),
        ("layers.3.self_attn.q_a_proj.weight", 0.005),
        ("layers.1.self_attn.k_conv1d.weight", 0.25),
        ("layers.1.self_attn.dt_bias", 0.5),
        ("layers.1.mlp_res_proj.weight", 128**-0.5),
        ("layers.1.block_sparse_moe.gate.weight", 0.02),
        ("embed_tokens.weight", 0.02),
    ],
)
def test_these_tensors_are_normal(values: dict[str, torch.Tensor], leaf: str, std: float) -> None:
    tensor = values[PREFIX + leaf].float()

    # The standard error of a standard deviation is std / sqrt(2 n); four of them and 1 % for the cut tails.
    assert tensor.std().item() == pytest.approx(std, rel=0.01 + 4 / (2 * tensor.numel()) ** 0.5)
    assert abs(tensor.mean().item()) < 4 * std / tensor.numel() ** 0.5


@pytest.mark.parametrize(
    "leaf", ["layers.1.input_layernorm.weight", "layers.1.self_attn.o_norm.weight", "layers.3.mlp_res_norm.weight"]
)
def test_norm_gains_are_spread_around_1(values: dict[str, torch.Tensor], leaf: str) -> None:
    gains = values[PREFIX + leaf].float()

    assert 0.8 <= gains.min().item() < 0.87
    assert 1.13 < gains.max().item() <= 1.204  # U(0.8, 1.2); bf16 steps by 2**-7 above 1


def test_the_decay_spans_its_range(values: dict[str, torch.Tensor]) -> None:
    a_log = torch.cat([values[f"{PREFIX}layers.{layer}.self_attn.A_log"][:6] for layer in (0, 1, 2, 4, 5, 6, 8, 9, 10)])

    assert 1 <= a_log.exp().min().item() < 3
    assert 13 < a_log.exp().max().item() <= 16.0001  # exp(log(x)) in float32


def test_the_routers_bias_changes_which_experts_are_chosen(values: dict[str, torch.Tensor]) -> None:
    gate = values[f"{PREFIX}layers.1.block_sparse_moe.gate.weight"].float()
    bias = values[f"{PREFIX}layers.1.block_sparse_moe.gate.e_score_correction_bias"]
    hidden = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    scores = torch.sigmoid(hidden @ gate.T)

    chosen = (scores + bias).topk(4).indices.sort().values
    unbiased = scores.topk(4).indices.sort().values

    assert (chosen != unbiased).any(dim=1).float().mean().item() > 0.25


def test_the_padding_token_has_a_zero_embedding(values: dict[str, torch.Tensor]) -> None:
    embedding = values[f"{PREFIX}embed_tokens.weight"].float()

    assert not embedding[511].any()
    assert embedding[:511].any(dim=1).all()


def test_two_runs_write_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "again", preset="tiny")

    for path in sorted(tiny.iterdir()):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_another_seed_changes_every_expert(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "other", preset="tiny", seed=1)

    name = "model-00002-of-000016.safetensors"
    with safe_open(tiny / name, "np") as first, safe_open(tmp_path / "other" / name, "np") as second:
        packed = [key for key in first.keys() if key.endswith("weight_packed")]  # noqa: SIM118
        assert len(packed) == 48
        assert all((first.get_tensor(key) != second.get_tensor(key)).any() for key in packed)


def test_a_tensors_bytes_depend_on_its_name_and_not_on_what_else_is_written(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "short", preset="tiny", num_layers=3, num_experts=12)

    whole = load_file(tiny / "model-00002-of-000016.safetensors")
    short = load_file(tmp_path / "short" / "model-00002-of-000006.safetensors")
    shared = [name for name, tensor in short.items() if tensor.shape == whole[name].shape]
    assert len(shared) == 124 - 4 * 6 - 2  # four experts fewer; the router's two tensors have other shapes
    assert all(torch.equal(short[name], whole[name]) for name in shared)


def test_the_scale_follows_its_codes_whatever_is_drawn_first() -> None:
    packed, scale = expert_matrix(random_stream(0, "name"), 64, 96)
    again_packed, again_scale = expert_matrix(random_stream(0, "name"), 64, 96)

    assert packed.shape == (64, 48)
    assert scale.shape == (64, 3)
    np.testing.assert_array_equal(packed, again_packed)
    np.testing.assert_array_equal(scale, again_scale)
