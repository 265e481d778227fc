"""Raw ``config.json`` objects: the released geometry, and a tiny network with every structural feature once."""

from __future__ import annotations

from typing import Any

# What Hugging Face's PretrainedConfig adds to every block it writes. No part of the network reads these.
_DUMP: dict[str, Any] = {
    "_name_or_path": "",
    "add_cross_attention": False,
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
        "AutoModel": "modeling_kimi_linear.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM",
    },
    "chunk_size_feed_forward": 0,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "dtype": "bfloat16",
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "transformers_version": "4.56.2",
    "typical_p": 1.0,
    "use_bfloat16": False,
    "use_cache": True,
} | dict.fromkeys(
    [
        "bad_words_ids",
        "begin_suppress_tokens",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "prefix",
        "problem_type",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "tokenizer_class",
    ]
)

# Fields that do not change with the size of the network.
_TEXT_KIND: dict[str, Any] = {
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "initializer_range": 0.02,
    "latent_moe_use_norm": True,
    "max_position_embeddings": 1048576,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
}

_VISION_KIND: dict[str, Any] = {
    "_attn_implementation": "flash_attention_2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_time": 4,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "patch_size": 14,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
}


def release_config_dict() -> dict[str, Any]:
    """The released ``config.json``: 93 layers, 896 experts, 2.78 T parameters. A fresh object each time."""
    text = {
        "attn_res_block_size": 12,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "kv_lora_rank": 512,
        "linear_attn_config": _linear_attention([*range(4, 93, 4), 93], 93, num_heads=96, head_dim=128),
        "moe_intermediate_size": 3072,
        "num_attention_heads": 96,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": 93,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_expert_hidden_size": 3584,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }
    vision = {
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "mm_hidden_size": 1024,
        "qkv_hidden_size": 1536,
        "text_hidden_size": 7168,
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12,
        "vt_num_hidden_layers": 27,
    }
    return _config(text, vision, bos=163584, eos=163586, pad=163839, placeholder=163605)


def tiny_config_dict() -> dict[str, Any]:
    """A K3 of 13 layers and 6.2 M parameters, in the layout of the release. A fresh object each time.

    Every structural feature is there once and no two dims are equal by accident: attention-residual boundaries fall
    on KDA and on MLA layers, the last block is ragged, the last two layers are MLA, heads differ from layer to layer.
    """
    text = {
        "attn_res_block_size": 3,
        "hidden_size": 128,
        "intermediate_size": 256,
        "kv_lora_rank": 32,
        "linear_attn_config": _linear_attention([4, 8, 12, 13], 13, num_heads=6, head_dim=32),
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_hidden_layers": 13,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "routed_expert_hidden_size": 96,
        "v_head_dim": 24,
        "vocab_size": 512,
    }
    vision = {
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "mm_hidden_size": 32,
        "qkv_hidden_size": 48,
        "text_hidden_size": 128,
        "vt_hidden_size": 32,
        "vt_intermediate_size": 64,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 2,
    }
    return _config(text, vision, bos=508, eos=509, pad=511, placeholder=505)


def _linear_attention(full_attn_layers: list[int], num_layers: int, *, num_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "full_attn_layers": full_attn_layers,
        "gate_lower_bound": -5.0,
        "head_dim": head_dim,
        "kda_layers": [layer for layer in range(1, num_layers + 1) if layer not in full_attn_layers],
        "num_heads": num_heads,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    }


def _quantization() -> dict[str, Any]:
    return {
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                    "zp_dtype": None,
                },
            }
        },
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _config(
    text: dict[str, Any], vision: dict[str, Any], *, bos: int, eos: int, pad: int, placeholder: int
) -> dict[str, Any]:
    tokens = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    text_block = _copied(_DUMP) | _TEXT_KIND | text | tokens | {"quantization_config": _quantization()}
    top = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        },
        **tokens,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": placeholder,
        "model_type": "kimi_k3",
        "text_config": dict(sorted(text_block.items())),
        "tie_word_embeddings": False,
        "vision_config": dict(sorted((_copied(_VISION_KIND) | vision).items())),
    }
    return dict(sorted(top.items()))


def _copied(block: dict[str, Any]) -> dict[str, Any]:
    """A copy whose nested lists and dicts belong to the caller."""
    return {key: value.copy() if isinstance(value, dict | list) else value for key, value in block.items()}
