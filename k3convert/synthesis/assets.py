"""The files of a checkpoint that hold no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3convert.synthesis.special_tokens import SpecialTokens
from k3convert.synthesis.vocabulary import rank_lines

# Source: the checkpoint's published preprocessor_config.json.
MEDIA_PROC_CFG: dict[str, Any] = {
    "in_patch_limit": 65536,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 16384,
    "sample_fps": 8.0,
    "temporal_merge_kernel_size": 4,
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}


def write_assets(folder: Path, config: dict[str, Any], special_tokens: SpecialTokens) -> None:
    """Write config, generation config, image preprocessing and tokenizer; no Python files, as nothing runs them."""
    vocab_size = config["text_config"]["vocab_size"]
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))
    _write_json(folder / "preprocessor_config.json", {"media_proc_cfg": MEDIA_PROC_CFG})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(special_tokens.ids(vocab_size)))
    with open(folder / "tiktoken.model", "wb") as file:
        file.writelines(rank_lines(special_tokens.num_ranks(vocab_size)))


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "transformers_version": config["text_config"]["transformers_version"],
    }


def _tokenizer_config(ids: dict[str, int]) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    by_id = sorted(ids.items(), key=lambda named: named[1])
    return {
        "added_tokens_decoder": {str(token_id): {"content": name, **flags} for name, token_id in by_id},
        "additional_special_tokens": [name for name, _ in by_id],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
