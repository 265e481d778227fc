"""The sizes of generated checkpoints, as changes to the tiny or the released ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from k3convert.errors import UsageError
from k3convert.synthesis.special_tokens import RELEASED, TINY, SpecialTokens
from k3model.presets import release_config_dict, tiny_config_dict

MLA_PERIOD = 4


@dataclass(frozen=True, slots=True)
class Preset:
    """One size: a base config, what differs from it, and the special tokens of its vocabulary."""

    base: Callable[[], dict[str, Any]]
    special_tokens: SpecialTokens
    text: Mapping[str, Any] = field(default_factory=dict)
    linear_attention: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "tiny": Preset(tiny_config_dict, TINY),
    # Many tensors: all 896 experts in 8 layers, each a few hundred kilobytes.
    "many": Preset(
        tiny_config_dict,
        RELEASED,
        text={
            "hidden_size": 512,
            "intermediate_size": 1024,
            "kv_lora_rank": 64,
            "moe_intermediate_size": 416,
            "num_attention_heads": 8,
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_hidden_layers": 9,
            "num_key_value_heads": 8,
            "q_lora_rank": 96,
            "routed_expert_hidden_size": 448,
            "vocab_size": 4096,
        },
        linear_attention={"num_heads": 8, "head_dim": 64},
        vision={"text_hidden_size": 512},
    ),
    # Large tensors: few experts of the true sizes.
    "large": Preset(
        tiny_config_dict,
        RELEASED,
        text={
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "kv_lora_rank": 128,
            "moe_intermediate_size": 3072,
            "num_attention_heads": 8,
            "num_hidden_layers": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": 256,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "routed_expert_hidden_size": 3584,
            "v_head_dim": 128,
            "vocab_size": 4096,
        },
        linear_attention={"num_heads": 8, "head_dim": 128},
        vision={"text_hidden_size": 1024},
    ),
    "release": Preset(release_config_dict, RELEASED),
}


def config_dict(preset_name: str, *, num_layers: int | None = None, num_experts: int | None = None) -> dict[str, Any]:
    """The ``config.json`` object of a preset, with another number of layers or experts if asked.

    Every fourth layer and the last one are MLA, the others KDA, as in the release; so the last two can both be MLA.

    Raises:
        UsageError: no such preset.
    """
    preset = find_preset(preset_name)
    config = preset.base()
    text, vision = config["text_config"], config["vision_config"]
    text |= preset.text
    vision |= preset.vision
    if num_experts is not None:
        text["num_experts"] = num_experts
        text["num_experts_per_token"] = min(text["num_experts_per_token"], num_experts)
    if num_layers is not None:
        text["num_hidden_layers"] = num_layers
    text["linear_attn_config"] |= preset.linear_attention
    text["linear_attn_config"] |= _layer_lists(text["num_hidden_layers"])
    ids = preset.special_tokens.ids(text["vocab_size"])
    tokens = {"bos_token_id": ids["[BOS]"], "eos_token_id": ids["<|end_of_msg|>"], "pad_token_id": ids["[PAD]"]}
    text |= tokens
    config |= tokens | {"media_placeholder_token_id": ids["<|media_pad|>"]}
    return config


def find_preset(name: str) -> Preset:
    """A preset by its name.

    Raises:
        UsageError: there is none.
    """
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]


def _layer_lists(num_layers: int) -> dict[str, list[int]]:
    """The two 1-based layer lists of ``linear_attn_config``."""
    full = [layer for layer in range(1, num_layers + 1) if layer % MLA_PERIOD == 0 or layer == num_layers]
    return {
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, num_layers + 1) if layer not in full],
    }
