"""Config, tokenizer and preprocessing files of a generated checkpoint."""

from __future__ import annotations

import base64
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from k3convert.synthesis.presets import config_dict
from k3convert.synthesis.special_tokens import RELEASED
from k3convert.synthesis.vocabulary import rank_lines, tokens
from k3model.presets import release_config_dict, tiny_config_dict


def read_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_the_config_is_the_tiny_one_with_the_quantization_block_in_its_text_config(tiny: Path) -> None:
    config = read_json(tiny / "config.json")

    assert config == tiny_config_dict()
    assert "quantization_config" not in config
    assert config["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"


def test_no_python_file_is_written(tiny: Path) -> None:
    assert sorted(path.name for path in tiny.iterdir() if path.suffix != ".safetensors") == [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "preprocessor_config.json",
        "tiktoken.model",
        "tokenizer_config.json",
    ]


def test_the_tiny_vocabulary_has_448_ranks_that_tiktoken_encodes_with(tiny: Path) -> None:
    lines = (tiny / "tiktoken.model").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}

    encoding = tiktoken.Encoding("tiny", pat_str=r"\s?\w+|.", mergeable_ranks=ranks, special_tokens={})

    text = "the assistant message, ünïcode 你好"
    assert sorted(ranks.values()) == list(range(448))
    assert encoding.decode(encoding.encode(text)) == text
    assert len(encoding.encode(" the assistant message")) == 3


@pytest.mark.parametrize(
    ("token_id", "name"),
    [
        (500, "<|open|>"),
        (501, "<|close|>"),
        (502, "<|sep|>"),
        (503, "<|media_begin|>"),
        (504, "<|media_content|>"),
        (505, "<|media_pad|>"),
        (506, "<|media_end|>"),
        (507, "[EOS]"),
        (508, "[BOS]"),
        (509, "<|end_of_msg|>"),
        (510, "[UNK]"),
        (511, "[PAD]"),
    ],
)
def test_the_tiny_special_tokens_have_their_ids(tiny: Path, token_id: int, name: str) -> None:
    added = read_json(tiny / "tokenizer_config.json")["added_tokens_decoder"]

    assert added[str(token_id)]["content"] == name
    assert added[str(token_id)]["special"] is True
    assert len(added) == 12


def test_the_released_special_tokens_have_their_ids() -> None:
    ids = RELEASED.ids(163840)

    assert RELEASED.num_ranks(163840) == 163584
    assert (ids["[BOS]"], ids["[EOS]"], ids["<|end_of_msg|>"]) == (163584, 163585, 163586)
    assert (ids["<|open|>"], ids["<|close|>"], ids["<|sep|>"]) == (163587, 163588, 163589)
    assert (ids["[start_header_id]"], ids["[end_header_id]"], ids["[EOT]"]) == (163590, 163591, 163593)
    assert (ids["<|media_begin|>"], ids["<|media_content|>"]) == (163602, 163603)
    assert (ids["<|media_end|>"], ids["<|media_pad|>"]) == (163604, 163605)
    assert (ids["<osagent_mode>"], ids["[UNK]"], ids["[PAD]"]) == (163649, 163838, 163839)


@pytest.mark.parametrize("preset", ["tiny", "many", "large", "release"])
def test_the_config_names_the_same_ids_as_the_vocabulary(preset: str) -> None:
    config = config_dict(preset)

    text = config["text_config"]
    assert [config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [
        text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    ]
    assert max(config["pad_token_id"], config["media_placeholder_token_id"]) < text["vocab_size"]


def test_the_release_preset_is_the_released_config() -> None:
    assert config_dict("release") == release_config_dict()


def test_generation_stops_at_the_end_of_a_message(tiny: Path) -> None:
    assert read_json(tiny / "generation_config.json")["eos_token_id"] == 509


def test_the_preprocessor_has_the_published_image_settings(tiny: Path) -> None:
    settings = read_json(tiny / "preprocessor_config.json")["media_proc_cfg"]

    assert (settings["patch_size"], settings["merge_kernel_size"], settings["in_patch_limit"]) == (14, 2, 65536)
    assert settings["config_type"] == "media_proc.processors.moonvit.MoonViTMediaProcessorConfig"


def test_the_vocabulary_is_large_enough_for_the_release_and_every_token_is_new() -> None:
    found = list(islice(tokens(), 163584))

    assert len(set(found)) == 163584
    assert found[:256] == [bytes((value,)) for value in range(256)]


def test_every_longer_token_is_an_earlier_one_and_one_byte() -> None:
    earlier: set[bytes] = set()
    for token in islice(tokens(), 30_000):
        assert len(token) == 1 or token[:-1] in earlier
        earlier.add(token)


def test_a_vocabulary_without_room_for_all_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="255 ranks cannot hold the 256 single bytes"):
        list(rank_lines(255))


def test_a_vocabulary_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="1000000 ranks were asked for"):
        list(rank_lines(1_000_000))
