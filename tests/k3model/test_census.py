"""The census: which tensors exist, in every mode of the config."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from k3model.census import TensorSpec, census, tally
from k3model.config import KimiK3Config
from k3model.presets import release_config_dict, tiny_config_dict


def specs_of(raw: dict[str, Any], *, packed: bool = True) -> dict[str, TensorSpec]:
    specs = list(census(KimiK3Config.from_dict(raw), packed=packed))
    by_name = {spec.name: spec for spec in specs}
    assert len(by_name) == len(specs)
    return by_name


@pytest.fixture(scope="module")
def release() -> list[TensorSpec]:
    return list(KimiK3Config.from_dict(release_config_dict()).census())


def test_the_release_has_exactly_the_names_of_its_index(release: list[TensorSpec], reference_fixtures: Path) -> None:
    with gzip.open(reference_fixtures / "kimi_k3_release" / "model.safetensors.index.json.gz") as file:
        index = json.load(file)

    names = {spec.name for spec in release}

    assert names == set(index["weight_map"])
    assert tally(release).total_bytes == index["metadata"]["total_size"]


def test_d9_the_release_adds_up_to_its_published_counts(release: list[TensorSpec]) -> None:
    counted = tally(release)

    assert counted.num_tensors == 497_220
    assert counted.packed_pairs == 247_296
    assert counted.packed_values == 2_722_740_830_208
    assert counted.plain_values == 57_191_006_976
    assert counted.total_bytes == 1_560_860_324_864
    assert counted.stored_bytes["trunk"] == 108_811_877_376
    assert counted.tensors["trunk"] == 2455
    assert sum(spec.dtype == "F32" for spec in release) == 506


def test_the_release_has_the_published_number_of_tensors_in_each_layer(release: list[TensorSpec]) -> None:
    counts = Counter(spec.layer_index for spec in release if spec.component in ("trunk", "routed_experts"))

    assert counts[0] == 23
    assert {counts[layer] for layer in range(1, 93)} == {5404, 5398}
    assert [layer for layer in range(1, 93) if counts[layer] == 5398] == [*range(3, 92, 4), 92]


def test_the_release_is_listed_layer_by_layer_then_the_rest(release: list[TensorSpec]) -> None:
    layers = [spec.layer_index for spec in release if spec.component in ("trunk", "routed_experts")]

    assert layers == sorted(layers, key=lambda layer: layer or 0)
    tail = list(dict.fromkeys(spec.component for spec in release[len(layers) :]))
    assert tail == ["embed", "final_norm", "lm_head", "projector", "vision"]


def test_the_tiny_network_adds_up() -> None:
    packed, plain = specs_of(tiny_config_dict()), specs_of(tiny_config_dict(), packed=False)

    assert (len(packed), len(plain)) == (1510, 934)
    counted = tally(packed.values())
    assert counted.total_bytes == 7_262_272
    assert counted.packed_values + counted.plain_values == 6_204_854 + 9 * 122


def test_a21_and_a_log_accept_both_shapes_and_store_the_released_one() -> None:
    specs = specs_of(tiny_config_dict())

    attention = "language_model.model.layers.0.self_attn."
    assert specs[f"{attention}A_log"].shapes == ((128,), (6,))
    assert specs[f"{attention}q_conv1d.weight"].shapes == ((192, 1, 4), (192, 4), (192, 4, 1))


def test_a_log_of_a_full_row_has_one_shape() -> None:
    raw = tiny_config_dict()
    raw["text_config"]["linear_attn_config"]["num_heads"] = 128

    assert specs_of(raw)["language_model.model.layers.0.self_attn.A_log"].shapes == ((128,),)


def test_b9_expert_shapes_follow_each_matrix() -> None:
    packed, plain = specs_of(tiny_config_dict()), specs_of(tiny_config_dict(), packed=False)

    expert = "language_model.model.layers.1.block_sparse_moe.experts.15."
    assert packed[f"{expert}w1.weight_packed"].shapes == ((64, 48),)
    assert packed[f"{expert}w1.weight_scale"].shapes == ((64, 3),)
    assert packed[f"{expert}w2.weight_packed"].shapes == ((96, 32),)
    assert packed[f"{expert}w2.weight_scale"].shapes == ((96, 2),)
    assert plain[f"{expert}w2.weight"].shapes == ((96, 64),)
    assert (plain[f"{expert}w2.weight"].layer_index, plain[f"{expert}w2.weight"].expert_index) == (1, 15)


def _suffixes(raw: dict[str, Any]) -> set[str]:
    return {name.rsplit("layers.", 1)[-1].split(".", 1)[-1] for name in specs_of(raw)}


def test_the_low_rank_gate_replaces_the_full_rank_one() -> None:
    raw = tiny_config_dict()
    raw["text_config"]["linear_attn_config"]["use_full_rank_gate"] = False

    specs = specs_of(raw)

    attention = "language_model.model.layers.0.self_attn."
    assert specs[f"{attention}g_a_proj.weight"].shapes == ((32, 128),)
    assert specs[f"{attention}g_b_proj.weight"].shapes == ((192, 32),)
    assert f"{attention}g_proj.weight" not in specs


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({"attn_res_block_size": None}, "_res_"),
        ({"routed_expert_hidden_size": None}, "routed_expert_"),
        ({"latent_moe_use_norm": False}, "routed_expert_norm"),
        ({"num_shared_experts": 0}, "shared_experts"),
        ({"num_shared_experts": None}, "shared_experts"),
        (
            {"num_experts": None, "num_experts_per_token": None, "moe_intermediate_size": None},
            "block_sparse_moe",
        ),
        ({"tie_word_embeddings": True}, "lm_head"),
    ],
)
def test_a_mode_without_a_part_has_none_of_its_tensors(changes: dict[str, Any], absent: str) -> None:
    raw = tiny_config_dict()
    del raw["tie_word_embeddings"]
    full = specs_of(raw)
    raw["text_config"] |= changes

    specs = specs_of(raw)

    assert any(absent in name for name in full)
    assert not any(absent in name for name in specs)


def test_without_a_latent_the_experts_see_the_hidden_size() -> None:
    raw = tiny_config_dict()
    raw["text_config"]["routed_expert_hidden_size"] = None

    specs = specs_of(raw, packed=False)

    assert specs["language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"].shapes == ((64, 128),)


def test_without_vision_there_is_no_tower_and_no_projector() -> None:
    raw = tiny_config_dict()
    raw["vision_config"] = None

    components = {spec.component for spec in specs_of(raw).values()}

    assert components == {"trunk", "routed_experts", "embed", "final_norm", "lm_head"}


def test_a_network_of_one_kind_of_attention_has_no_tensor_of_the_other() -> None:
    only_mla, only_kda = tiny_config_dict(), tiny_config_dict()
    only_mla["text_config"]["linear_attn_config"] = None
    only_kda["text_config"]["linear_attn_config"] |= {"kda_layers": [*range(1, 14)], "full_attn_layers": []}
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        del only_kda["text_config"][name]

    mla_names, kda_names = set(specs_of(only_mla)), set(specs_of(only_kda))

    assert not any("A_log" in name for name in mla_names)
    assert not any("kv_b_proj" in name for name in kda_names)


def test_layer_frequency_and_first_layer_decide_where_experts_are() -> None:
    raw = tiny_config_dict()
    raw["text_config"] |= {"first_k_dense_replace": 3, "moe_layer_freq": 2}

    layers = {spec.layer_index for spec in specs_of(raw).values() if spec.component == "routed_experts"}

    assert layers == {4, 6, 8, 10, 12}
