"""Elements in words. The names and shapes are those of a real network."""

from __future__ import annotations

import pytest
import torch

from k3convert.parity.divergence_place import describe_element, place_of, ulps_between
from k3convert.parity.records import Entry, Kind
from k3model.config import KimiK3Config
from k3model.network import KimiK3ForConditionalGeneration
from k3model.presets import tiny_config_dict

TEXT = "language_model.model.layers"
KDA, MLA = 1, 3


@pytest.fixture(scope="module")
def config() -> KimiK3Config:
    return KimiK3Config.from_dict(tiny_config_dict())


def entry(kind: Kind, name: str, shape: tuple[int, ...], layer: int | None = None, impl: str = "") -> Entry:
    return Entry(kind, name, 0, "", layer, impl, "float32", shape)


def words(config: KimiK3Config, kind: Kind, name: str, shape: tuple[int, ...], index: tuple[int, ...]) -> str:
    layer = int(name.split(".")[3]) if name.startswith(TEXT) else None
    return ", ".join(
        f"{key} {value}" for key, value in place_of(entry(kind, name, shape, layer), index, config).coordinates
    )


def test_every_parameter_of_the_network_has_named_dims(config: KimiK3Config) -> None:
    with torch.device("meta"):
        network = KimiK3ForConditionalGeneration(config)

    unnamed = {
        name
        for name, parameter in network.language_model.named_parameters("language_model")
        if "dim " in words(config, Kind.PARAMETER_GRADIENT, name, tuple(parameter.shape), (0,) * parameter.dim())
    }
    assert not unnamed


@pytest.mark.parametrize(
    ("kind", "name", "width", "index", "want"),
    [
        (Kind.OUTPUT, f"{TEXT}.{KDA}.self_attn.q_proj", (192,), (70,), "head 2, channel 6"),
        (Kind.OUTPUT_GRADIENT, f"{TEXT}.{KDA}.self_attn.k_conv1d", (192,), (70,), "head 2, channel 6"),
        (Kind.OUTPUT, f"{TEXT}.{KDA}.self_attn.decay", (6, 32), (5, 31), "head 5, channel 31"),
        (Kind.OUTPUT, f"{TEXT}.{KDA}.self_attn.b_proj", (6,), (5,), "head 5"),
        (Kind.OUTPUT, f"{TEXT}.{KDA}.self_attn", (128,), (9,), "hidden channel 9"),
        (Kind.OUTPUT, f"{TEXT}.{KDA}", (128,), (9,), "hidden channel 9"),
        (Kind.OUTPUT, f"{TEXT}.{KDA}.block_sparse_moe.experts", (64,), (9,), "latent channel 9"),
        (Kind.ROUTING_SCORES, f"{TEXT}.{KDA}.block_sparse_moe.gate", (16,), (9,), "expert 9"),
        (Kind.ROUTED_EXPERTS, f"{TEXT}.{KDA}.block_sparse_moe.gate", (4,), (3,), "slot 3"),
        (Kind.INPUT, f"{TEXT}.{KDA}.self_attn.o_proj#0", (192,), (70,), "head 2, channel 6"),
        (Kind.LOGITS, "logits", (512,), (77,), "token id 77"),
    ],
)
def test_an_output_is_named_by_token_and_channel(
    config: KimiK3Config, kind: Kind, name: str, width: tuple[int, ...], index: tuple[int, ...], want: str
) -> None:
    assert words(config, kind, name, (2, 64, *width), (1, 17, *index)) == f"row 1, position 17, {want}"


def test_the_channels_of_mla_are_named_by_what_they_hold(config: KimiK3Config) -> None:
    mla = config.text.mla
    assert mla is not None
    per_head = mla.qk_nope_head_dim + mla.v_head_dim
    base, token = f"{TEXT}.{MLA}.self_attn", "row 0, position 0"

    def at(name: str, width: int, index: int) -> str:
        return words(config, Kind.OUTPUT, f"{base}.{name}", (1, 1, width), (0, 0, index))

    kv_width, rank = mla.num_heads * per_head, mla.kv_lora_rank
    assert at("kv_b_proj", kv_width, per_head + 1) == f"{token}, head 1, key channel 1"
    assert at("kv_b_proj", kv_width, per_head + mla.qk_nope_head_dim) == f"{token}, head 1, value channel 0"
    assert at("q_b_proj", mla.num_heads * mla.qk_head_dim, mla.qk_head_dim + 2) == f"{token}, head 1, channel 2"
    assert at("kv_a_proj_with_mqa", rank + mla.qk_rope_head_dim, rank - 1) == (
        f"{token}, key-value latent channel {rank - 1}"
    )  # fmt: skip
    assert at("kv_a_proj_with_mqa", rank + mla.qk_rope_head_dim, rank + 3) == f"{token}, shared key channel 3"


@pytest.mark.parametrize(
    ("name", "shape", "index", "want"),
    [
        (f"{TEXT}.{KDA}.self_attn.q_proj.weight", (192, 128), (70, 3), "head 2, channel 6, hidden channel 3"),
        (f"{TEXT}.{KDA}.self_attn.o_proj.weight", (128, 192), (3, 70), "hidden channel 3, head 2, channel 6"),
        (f"{TEXT}.{KDA}.self_attn.decay.A_log", (6,), (4,), "head 4"),
        (f"{TEXT}.{KDA}.self_attn.decay.dt_bias", (192,), (70,), "head 2, channel 6"),
        (f"{TEXT}.{KDA}.self_attn.q_conv1d.weight", (192, 1, 4), (70, 0, 3), "head 2, channel 6, tap 3"),
        (f"{TEXT}.{KDA}.block_sparse_moe.experts.w2", (16, 64, 64), (7, 1, 2),
         "expert 7, latent channel 1, intermediate channel 2"),
        (f"{TEXT}.{KDA}.block_sparse_moe.gate.weight", (16, 128), (7, 1), "expert 7, hidden channel 1"),
        (f"{TEXT}.{KDA}.mlp_res_proj.weight", (1, 128), (0, 1), "hidden channel 1"),
        (f"{TEXT}.{KDA}.input_layernorm.weight", (128,), (5,), "hidden channel 5"),
        ("language_model.lm_head.weight", (512, 128), (7, 1), "token id 7, hidden channel 1"),
    ],
)  # fmt: skip
def test_a_parameter_is_named_by_what_it_writes_and_reads(
    config: KimiK3Config, name: str, shape: tuple[int, ...], index: tuple[int, ...], want: str
) -> None:
    assert words(config, Kind.PARAMETER_GRADIENT, name, shape, index) == want


def test_a_flat_index_is_the_same_place(config: KimiK3Config) -> None:
    tensor = entry(Kind.OUTPUT, f"{TEXT}.{KDA}.self_attn.q_proj", (2, 64, 192), KDA)
    flat = torch.arange(2 * 64 * 192).view(2, 64, 192)[1, 17, 70]

    assert place_of(tensor, int(flat), config) == place_of(tensor, (1, 17, 70), config)


def test_a_description_has_layer_module_op_values_and_distance(config: KimiK3Config) -> None:
    name = f"{TEXT}.{KDA}.self_attn.q_proj"
    tensor = entry(Kind.OUTPUT, name, (2, 64, 192), KDA, "kda/chunk/fla")

    text = describe_element(tensor, (1, 17, 70), config, candidate=1.0, baseline=1.0 + 2**-21)
    assert text == (
        f"layer 1 (KDA), {name}, output: row 1, position 17, head 2, channel 6 [kda/chunk/fla]: "
        "1, and the baseline has 1.00000048 (4 ULP apart)"
    )


def test_a_scalar_and_an_unknown_module_are_described_too(config: KimiK3Config) -> None:
    assert str(place_of(entry(Kind.LOSS, "loss", ()), (), config)) == "loss"
    assert str(place_of(entry(Kind.OUTPUT, "vision_tower.blocks.0", (9, 4)), (8, 3), config)) == (
        "vision_tower.blocks.0, output: patch 8, dim 1 3"
    )
    assert "row 1, position 2, dim 2 3" in str(place_of(entry(Kind.OUTPUT, "novel", (3, 4, 5)), (1, 2, 3), config))
    assert "dim 0 1" in str(place_of(entry(Kind.OUTPUT, "novel", (3,)), (1,), config))


@pytest.mark.parametrize("index", [(2, 0), (0, -1), (0,), 6])
def test_an_element_that_is_not_there_is_refused(config: KimiK3Config, index: int | tuple[int, ...]) -> None:
    with pytest.raises(IndexError):
        place_of(entry(Kind.TOKEN_LOSS, "token_loss", (2, 3)), index, config)


def test_distances_across_zero_and_beside_nan_are_not_counted() -> None:
    assert ulps_between(1.0, 1.0, torch.bfloat16) == 0
    assert ulps_between(1.0, 1.0 + 2**-7, torch.bfloat16) == 1
    assert ulps_between(-1e-9, 1e-9, torch.float32) is None
    assert ulps_between(float("nan"), 1.0, torch.float32) is None
