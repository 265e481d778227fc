"""Text to token ids with ranks from a folder."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from k3model.tokenizer import KimiTokenizer, _short_pieces, read_ranks

# Merges of a tiny vocabulary, lowest rank first, after the 256 single bytes.
WORDS = ["he", "ll", "hell", "hello", " w", "or", " wor", "ld", "你好", "ro", "le", "role", " role", '="', '="&']
MERGES = [word.encode() for word in WORDS]
SPECIALS = {
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": 254,
    "[PAD]": 255,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokens = [bytes([value]) for value in range(256)] + MERGES
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    added = {str(len(tokens) + offset): {"content": name} for name, offset in SPECIALS.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> KimiTokenizer:
    return KimiTokenizer.from_folder(folder)


def test_the_vocabulary_is_ranks_and_256_special_tokens(tokenizer: KimiTokenizer) -> None:
    first = 256 + len(MERGES)

    assert tokenizer.vocab_size == first + 256
    assert tokenizer.end_of_message_id == first + 2
    assert tokenizer.special_tokens[f"<|reserved_token_{first}|>"] == first


@pytest.mark.parametrize("text", ["hello world", "你好 café 🦉", "x=1\n\n  y", "<|open|>", "", "IT'S 12345"])
def test_decoding_gives_the_text_back(tokenizer: KimiTokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)

    assert tokenizer.decode(token_ids) == text


def test_special_tokens_in_ordinary_text_are_ordinary_bytes(tokenizer: KimiTokenizer) -> None:
    ordinary = tokenizer.encode("<|open|>")
    control = tokenizer.encode("<|open|>", allow_special=True)

    assert len(control) == 1
    assert max(ordinary) < control[0]


def test_pieces_are_tokenized_one_by_one(tokenizer: KimiTokenizer) -> None:
    encoded = tokenizer.encode_chat([{"role": "user", "name": "&", "content": "hello"}], thinking=False)

    # Joined, the attribute's ="& would be one token.
    together = tokenizer.encode(tokenizer.decode(encoded.input_ids), allow_special=True)
    assert tokenizer.decode(together) == tokenizer.decode(encoded.input_ids)
    assert together != encoded.input_ids


def test_the_loss_mask_covers_exactly_the_assistants_tokens(tokenizer: KimiTokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]

    encoded = tokenizer.encode_chat(messages, add_generation_prompt=False)

    trained = [token for token, counts in zip(encoded.input_ids, encoded.loss_mask, strict=True) if counts]
    assert tokenizer.decode(trained) == (
        "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>world<|close|>response<|sep|>"
        "<|close|>message<|sep|><|end_of_msg|>"
    )


def test_special_tokens_can_be_left_out_of_the_text(tokenizer: KimiTokenizer) -> None:
    token_ids = tokenizer.encode("hello<|end_of_msg|>", allow_special=True)

    assert tokenizer.decode(token_ids, skip_special=True) == "hello"


def test_han_and_latin_never_share_a_token(tokenizer: KimiTokenizer) -> None:
    pieces = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("hello你好")]

    assert pieces == [b"hello", "你好".encode()]


@pytest.mark.parametrize(
    "text", ["a" * 60_000, " " * 25_001, "ab " * 200_000, "a" * 25_000 + " " * 25_000, "", "short"]
)
def test_long_texts_are_cut_into_pieces_that_join_to_the_text(text: str) -> None:
    pieces = list(_short_pieces(text))

    assert "".join(pieces) == text
    assert all(len(piece) <= 400_000 for piece in pieces)
    longest_run = max((len(run) for piece in pieces for run in piece.replace(" ", "\n \n").splitlines()), default=0)
    assert longest_run <= 25_000


def test_a_run_is_cut_after_25000_characters() -> None:
    assert [len(piece) for piece in _short_pieces("a" * 60_000)] == [25_000, 25_000, 10_000]


def test_a_broken_rank_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_text("aGU= 0\nnot a rank\n")

    with pytest.raises(ValueError, match="line 2"):
        read_ranks(path)


def test_ranks_with_a_gap_are_refused() -> None:
    with pytest.raises(ValueError, match="without a gap"):
        KimiTokenizer({b"a": 0, b"b": 2}, {})


def test_a_special_name_outside_the_special_ids_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[300\] are outside 1..256"):
        KimiTokenizer({b"a": 0}, {7: "x", 300: "y"})
