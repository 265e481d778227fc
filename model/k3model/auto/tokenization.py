"""The tokenizer as transformers holds it; the class name is the one that checkpoints name."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from transformers import AddedToken, BatchEncoding, PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from k3model.chat import render
from k3model.tokenizer import RANKS_FILE, EncodedChat, KimiTokenizer, num_special_tokens, read_ranks

DEFAULT_THINKING_EFFORT = "max"


class TikTokenTokenizer(PreTrainedTokenizer):  # type: ignore[misc]  # transformers is untyped
    """tiktoken ranks and special tokens; conversations are encoded piece by piece, without a template."""

    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": RANKS_FILE}
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]

    def __init__(
        self,
        vocab_file: str,
        added_tokens_decoder: Mapping[int, AddedToken | str] | None = None,
        bos_token: str = "[BOS]",
        eos_token: str = "[EOS]",
        unk_token: str = "[UNK]",
        pad_token: str = "[PAD]",
        **kwargs: Any,
    ) -> None:
        added = {int(token_id): token for token_id, token in (added_tokens_decoder or {}).items()}
        ranks = read_ranks(Path(vocab_file))
        names = {token_id: str(token) for token_id, token in added.items()}
        self.vocab_file = vocab_file
        self.native = KimiTokenizer(ranks, names, num_special_tokens(Path(vocab_file).parent, len(ranks)))
        self._characters = bytes_to_unicode()
        super().__init__(
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            pad_token=pad_token,
            added_tokens_decoder=added,
            special_tokens_pattern="none",
            **kwargs,
        )

    @property
    def vocab_size(self) -> int:
        """Ranks and special tokens together."""
        return self.native.vocab_size

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return {self._convert_id_to_token(token_id): token_id for token_id in range(self.native.vocab_size)}

    def get_vocab(self) -> dict[str, int]:
        """Every token as text, bytes written as the printable characters that stand for them."""
        return dict(self._vocabulary)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self._convert_id_to_token(token_id) for token_id in self.native.encode(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        found = self._vocabulary.get(token)
        return self.unk_token_id if found is None else found

    def _convert_id_to_token(self, index: int) -> str:
        return "".join(self._characters[byte] for byte in self.native.token_bytes(index))

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Join tokens; bytes that are no UTF-8 read as U+FFFD."""
        by_character = {character: byte for byte, character in self._characters.items()}
        return bytes(by_character[character] for token in tokens for character in token).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Copy the ranks file."""
        name = f"{filename_prefix}-{RANKS_FILE}" if filename_prefix else RANKS_FILE
        destination = Path(save_directory) / name
        if destination.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, destination)
        return (str(destination),)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        return_tensors: str | None = None,
        padding: bool | str = False,
        thinking_effort: str | None = DEFAULT_THINKING_EFFORT,
        **options: Any,
    ) -> Any:
        """Encode one conversation or a list of them.

        Args:
            conversation: messages, or lists of messages; see ``k3model.chat.render``, which also says what raises.
            tools: declarations that stand before everything else.
            add_generation_prompt: open the assistant's next turn.
            tokenize: false returns the text instead; its pieces can then not be told apart any more.
            return_dict: false returns ids only.
            return_assistant_tokens_mask: also say which tokens a training loss counts, as ``assistant_masks``.
            return_tensors: ``"pt"`` for tensors.
            padding: as everywhere in transformers.
            thinking_effort: one of the trained levels, or None to say nothing.
            options: the other options of ``k3model.chat.render``.
        """
        is_batch = bool(conversation) and not isinstance(conversation[0], Mapping)
        rendered = [
            render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                thinking_effort=thinking_effort,
                **options,
            )
            for messages in (conversation if is_batch else [conversation])
        ]
        if not tokenize:
            texts = ["".join(segment.text for segment in segments) for segments in rendered]
            return texts if is_batch else texts[0]
        encoded = [self.native.encode_segments(segments) for segments in rendered]
        batch = self._batch(encoded, padding, with_mask=return_assistant_tokens_mask)
        if return_tensors is None and not is_batch:
            batch = BatchEncoding({name: values[0] for name, values in batch.items()})
        elif return_tensors is not None:
            batch = BatchEncoding(batch, tensor_type=return_tensors)
        return batch if return_dict else batch["input_ids"]

    def _batch(self, encoded: Sequence[EncodedChat], padding: bool | str, *, with_mask: bool) -> BatchEncoding:
        rows = [{"input_ids": row.input_ids, "attention_mask": [1] * len(row.input_ids)} for row in encoded]
        batch = self.pad(rows, padding=padding) if padding else BatchEncoding(_columns(rows))
        if with_mask:
            masks = []
            for row, input_ids in zip(encoded, batch["input_ids"], strict=True):
                zeros = [0] * (len(input_ids) - len(row.loss_mask))
                counted = [int(counts) for counts in row.loss_mask]
                masks.append(zeros + counted if self.padding_side == "left" else counted + zeros)
            batch["assistant_masks"] = masks
        return batch


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}
