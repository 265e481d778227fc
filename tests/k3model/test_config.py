"""Reading config.json: geometry is strict, absent fields have one value, everything wrong is named."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3model.config import ConfigError, KimiK3Config, TextConfig, truncated_dict
from k3model.presets import release_config_dict, tiny_config_dict


def edited(**changes: Any) -> dict[str, Any]:
    """The tiny config with fields of its text block replaced; the value ``...`` removes a field."""
    raw = tiny_config_dict()
    _edit(raw["text_config"], changes)
    return raw


def edited_linear(**changes: Any) -> dict[str, Any]:
    raw = tiny_config_dict()
    _edit(raw["text_config"]["linear_attn_config"], changes)
    return raw


def _edit(block: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if value is ...:
            del block[name]
        else:
            block[name] = value


def reasons_of(raw: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        KimiK3Config.from_dict(raw)
    return caught.value.reasons


def test_the_release_preset_is_the_released_file(reference_fixtures: Path) -> None:
    released = (reference_fixtures / "kimi_k3_release" / "config.json").read_text()

    preset = json.dumps(release_config_dict(), indent=2)

    assert preset == released


def test_the_release_reads_as_its_geometry() -> None:
    config = KimiK3Config.from_dict(release_config_dict())

    text = config.text
    assert (text.num_hidden_layers, len(text.kda_layers), text.hidden_size) == (93, 69, 7168)
    assert [layer for layer in range(93) if not config.is_kda(layer)] == [*range(3, 92, 4), 92]
    assert [layer for layer in range(93) if not config.is_moe(layer)] == [0]
    assert text.moe is not None
    assert (text.moe.latent_size, text.moe.num_experts_per_token) == (3584, 16)
    assert text.mla is not None
    assert text.mla.qk_head_dim == 192
    assert config.vision is not None
    assert (config.vision.head_dim, config.vision.merged_size) == (128, 4096)
    assert config.unknown_keys == ()


@pytest.mark.parametrize("name", ["automodel_tiny", "released_tiny"])
def test_configs_of_other_implementations_read_without_an_unknown_key(reference_fixtures: Path, name: str) -> None:
    raw = json.loads((reference_fixtures / name / "config.json").read_text())

    config = KimiK3Config.from_dict(raw)

    assert config.unknown_keys == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bad_layer_index", "[999]"), ("bad_topk", "128 exceeds"), ("no_layermap", "full_attn_layers is missing")],
)
def test_a_flat_file_of_another_spelling_is_refused_with_what_it_means(
    reference_fixtures: Path, name: str, expected: str
) -> None:
    raw = json.loads((reference_fixtures / "bad_configs" / f"{name}.json").read_text())

    reasons = reasons_of(raw)

    assert any("text_config is missing" in reason for reason in reasons)
    assert any("'linear_attn_config.num_heads'" in reason for reason in reasons)
    assert any(expected in reason for reason in reasons)


@pytest.mark.parametrize(
    ("kda_layers", "full_attn_layers", "expected"),
    [
        ([0, 1, 2, 3, 5, 6, 7, 9, 10, 11], [4, 8, 12, 13], "[0] are outside 1..13"),
        ([1, 2, 3, 4, 5, 6, 7, 9, 10, 11], [4, 8, 12, 13], "[4] are named twice"),
        ([1, 2, 3, 6, 7, 9, 10, 11], [4, 8, 12, 13], "[5] are in neither"),
        ([1, 2, 3, 5, 6, 7, 9, 10, 11], [4, 8, 12, 13, 14], "[14] are outside 1..13"),
        ([1, 2, 3, 5, 6, 7, 9, 10, 11], None, "full_attn_layers is missing"),
    ],
)
def test_d1_layer_lists_must_be_one_based_and_cover_every_layer_once(
    kda_layers: Any, full_attn_layers: Any, expected: str
) -> None:
    raw = edited_linear(kda_layers=kda_layers, full_attn_layers=full_attn_layers)

    reasons = reasons_of(raw)

    assert any(expected in reason for reason in reasons)


@pytest.mark.parametrize(("written", "read"), [(-5.0, -5.0), (None, None), (..., None)])
def test_d2_the_decay_gate_follows_the_file_and_no_default(written: Any, read: float | None) -> None:
    config = KimiK3Config.from_dict(edited_linear(gate_lower_bound=written))

    assert config.text.kda is not None
    assert config.text.kda.gate_lower_bound == read


@pytest.mark.parametrize("bound", [0.0, 1.0, -5.5, "-5", True])
def test_d2_a_gate_bound_outside_what_the_kernels_can_factor_is_refused(bound: Any) -> None:
    reasons = reasons_of(edited_linear(gate_lower_bound=bound))

    assert any("gate_lower_bound must be null or in [-5.0, 0)" in reason for reason in reasons)


def test_d5_rotary_attention_is_refused() -> None:
    reasons = reasons_of(edited(mla_use_nope=False))

    assert any("mla_use_nope must be true" in reason for reason in reasons)


def test_d5_rope_fields_that_newer_dumps_add_mean_nothing_without_positions() -> None:
    raw = edited(rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})

    config = KimiK3Config.from_dict(raw)

    assert config == KimiK3Config.from_dict(tiny_config_dict())
    assert config.unknown_keys == ()


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_spellings_and_is_checked(name: str) -> None:
    raw = tiny_config_dict()
    del raw["dtype"]
    raw[name] = "float32"
    assert KimiK3Config.from_dict(raw).dtype == "float32"

    raw[name] = "int4"

    assert any("dtype must be one of" in reason for reason in reasons_of(raw))


def test_without_experts_the_other_expert_fields_mean_nothing() -> None:
    assert KimiK3Config.from_dict(edited(num_experts=None)).text.moe is None


def test_null_key_value_heads_are_as_many_as_heads() -> None:
    assert KimiK3Config.from_dict(edited(num_key_value_heads=None)) == KimiK3Config.from_dict(tiny_config_dict())

    assert any("num_key_value_heads 2" in reason for reason in reasons_of(edited(num_key_value_heads=2)))


def test_d6_absent_dropout_means_none_and_a_dropout_is_refused() -> None:
    KimiK3Config.from_dict(edited(attention_dropout=0.0))

    reasons = reasons_of(edited(attention_dropout=0.1))

    assert any("attention_dropout" in reason for reason in reasons)


def test_d7_kda_heads_come_from_their_own_block() -> None:
    raw = edited(num_attention_heads=8, num_key_value_heads=8, head_dim=74)

    text = KimiK3Config.from_dict(raw).text

    assert text.kda is not None
    assert text.mla is not None
    assert (text.kda.num_heads, text.kda.head_dim, text.mla.num_heads) == (6, 32, 8)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("num_experts", "n_routed_experts"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_shared_experts", "n_shared_experts"),
        ("moe_router_activation_func", "scoring_func"),
    ],
)
def test_d8_another_familys_spelling_is_refused_by_name(right: str, wrong: str) -> None:
    raw = tiny_config_dict()
    text = raw["text_config"]
    text[wrong] = text.pop(right)

    reasons = reasons_of(raw)

    assert any(repr(wrong) in reason and repr(right) in reason for reason in reasons)


def test_d10_a_block_size_of_zero_is_refused_and_null_means_the_plain_stream() -> None:
    assert KimiK3Config.from_dict(edited(attn_res_block_size=None)).text.attn_res_block_size is None

    reasons = reasons_of(edited(attn_res_block_size=0))

    assert any("attn_res_block_size" in reason for reason in reasons)


@pytest.mark.parametrize("written", [0, None, ...])
def test_c14_no_next_token_layers_is_written_in_three_ways(written: Any) -> None:
    assert KimiK3Config.from_dict(edited(num_nextn_predict_layers=written)) == KimiK3Config.from_dict(
        tiny_config_dict()
    )


def test_c14_a_next_token_layer_is_refused() -> None:
    assert any("num_nextn_predict_layers" in reason for reason in reasons_of(edited(num_nextn_predict_layers=1)))


def test_b6_the_quantization_block_may_stand_at_the_top_or_inside_or_in_both() -> None:
    inside = tiny_config_dict()
    both = tiny_config_dict()
    both["quantization_config"] = copy.deepcopy(both["text_config"]["quantization_config"])
    top = copy.deepcopy(both)
    del top["text_config"]["quantization_config"]

    configs = {KimiK3Config.from_dict(raw) for raw in (inside, both, top)}

    assert len(configs) == 1
    assert configs.pop().quantization is not None


def test_b6_two_blocks_that_contradict_each_other_are_refused() -> None:
    raw = tiny_config_dict()
    raw["quantization_config"] = copy.deepcopy(raw["text_config"]["quantization_config"])
    raw["quantization_config"]["ignore"] = []

    reasons = reasons_of(raw)

    assert any("contradicts the one in text_config: ignore" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_size", 16),
        ("num_bits", 8),
        ("type", "int"),
        ("strategy", "channel"),
        ("symmetric", False),
        ("dynamic", True),
        ("scale_dtype", "torch.float8_e4m3fn"),
    ],
)
def test_b7_a_scheme_other_than_mxfp4_is_refused_with_expected_and_found(field: str, value: Any) -> None:
    raw = tiny_config_dict()
    weights = raw["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]
    expected = weights[field]
    weights[field] = value

    reasons = reasons_of(raw)

    assert any(f"{field} must be {expected!r}, got {value!r}" in reason for reason in reasons)


def test_b7_both_lists_of_exempt_modules_count() -> None:
    raw = tiny_config_dict()
    block = raw["text_config"]["quantization_config"]
    block["modules_to_not_convert"] = ["language_model.model.embed_tokens"]

    quantization = KimiK3Config.from_dict(raw).quantization

    assert quantization is not None
    assert quantization.is_ignored("language_model.model.layers.0.self_attn.q_proj")
    assert quantization.is_ignored("language_model.model.embed_tokens")
    assert not quantization.is_ignored("language_model.model.layers.1.block_sparse_moe.experts.0.w1")


def test_b7_experts_that_do_not_fill_blocks_are_refused_when_packed_only() -> None:
    raw = edited(moe_intermediate_size=48)

    reasons = reasons_of(raw)
    del raw["text_config"]["quantization_config"]

    assert any("moe_intermediate_size is 48" in reason for reason in reasons)
    KimiK3Config.from_dict(raw)


def test_every_reason_is_reported_at_once() -> None:
    raw = edited(vocab_size="many", num_experts_per_token=17, hidden_act="silu", attn_res_block_size=-1)

    reasons = reasons_of(raw)

    assert len(reasons) >= 4


def test_an_unknown_key_is_reported_and_unknown_geometry_refused() -> None:
    assert KimiK3Config.from_dict(edited(release_note="x")).unknown_keys == ("text_config.release_note",)

    assert any("'router_heads'" in reason for reason in reasons_of(edited(router_heads=2)))


def test_a_misspelled_field_is_refused() -> None:
    reasons = reasons_of(edited(attn_res_blocksize=3))

    assert any("'attn_res_blocksize'" in reason and "'attn_res_block_size'" in reason for reason in reasons)


@pytest.mark.parametrize("name", ["pad_token_id", "tie_word_embeddings"])
def test_a_field_said_twice_must_say_the_same(name: str) -> None:
    raw = tiny_config_dict()
    raw[name] = 7

    assert any(name in reason for reason in reasons_of(raw))


def test_a_wrong_model_type_is_refused() -> None:
    raw = tiny_config_dict()
    raw["model_type"] = "kimi_linear"

    assert reasons_of(raw) == ("model_type must be 'kimi_k3', got 'kimi_linear'",)


def test_vision_dims_that_do_not_fit_each_other_are_refused() -> None:
    raw = tiny_config_dict()
    raw["vision_config"] |= {"text_hidden_size": 64, "qkv_hidden_size": 50, "mm_hidden_size": 64, "attn_bias": True}

    reasons = reasons_of(raw)

    for name in ("text_hidden_size", "qkv_hidden_size", "mm_hidden_size", "attn_bias"):
        assert any(name in reason for reason in reasons), name


def test_an_empty_vision_block_is_the_released_tower() -> None:
    raw = release_config_dict()
    full = KimiK3Config.from_dict(raw)
    raw["vision_config"] = {}

    assert KimiK3Config.from_dict(raw) == full


def test_a_text_block_reads_on_its_own() -> None:
    raw = tiny_config_dict()

    assert TextConfig.from_dict(raw["text_config"]) == KimiK3Config.from_dict(raw).text


@pytest.mark.parametrize("num_layers", [1, 3, 4, 13])
def test_truncating_the_file_and_the_config_agree(num_layers: int) -> None:
    raw = tiny_config_dict()

    cut = truncated_dict(raw, num_layers)

    assert KimiK3Config.from_dict(cut) == KimiK3Config.from_dict(raw).with_num_layers(num_layers)


def test_truncating_the_file_keeps_every_other_key_in_order() -> None:
    raw = tiny_config_dict()

    cut = truncated_dict(raw, 5)

    assert raw == tiny_config_dict()
    assert list(cut) == list(raw)
    assert list(cut["text_config"]) == list(raw["text_config"])
    changed = {name for name, value in raw["text_config"].items() if cut["text_config"][name] != value}
    assert changed == {"num_hidden_layers", "linear_attn_config"}
    assert cut["text_config"]["linear_attn_config"]["full_attn_layers"] == [4]


@pytest.mark.parametrize("num_layers", [0, 14])
def test_a_truncation_to_layers_that_are_not_there_is_refused(num_layers: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.13"):
        KimiK3Config.from_dict(tiny_config_dict()).with_num_layers(num_layers)


def test_reading_a_config_imports_no_torch() -> None:
    script = "import sys; import k3model.census, k3model.presets; print({'torch', 'transformers'} & set(sys.modules))"

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "set()"
