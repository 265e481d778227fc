"""The special tokens at the end of a vocabulary: which there are, and their ids.

Source of the released names and ids: the checkpoint's ``tokenizer_config.json`` (``added_tokens_decoder``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The last ``count`` ids of a vocabulary; those without a name are reserved.

    Attributes:
        count: special ids; the mergeable ranks are the ids before them.
        names: name to position among the special ids.
    """

    count: int
    names: Mapping[str, int]

    def num_ranks(self, vocab_size: int) -> int:
        """Mergeable ranks of a vocabulary."""
        return vocab_size - self.count

    def ids(self, vocab_size: int) -> dict[str, int]:
        """Name to token id."""
        return {name: self.num_ranks(vocab_size) + position for name, position in self.names.items()}


RELEASED = SpecialTokens(
    256,
    {
        "[BOS]": 0,
        "[EOS]": 1,
        "<|end_of_msg|>": 2,
        "<|open|>": 3,
        "<|close|>": 4,
        "<|sep|>": 5,
        "[start_header_id]": 6,
        "[end_header_id]": 7,
        "[EOT]": 9,
        "<|media_begin|>": 18,
        "<|media_content|>": 19,
        "<|media_end|>": 20,
        "<|media_pad|>": 21,
        "<osagent_mode>": 65,
        "[UNK]": 254,
        "[PAD]": 255,
    },
)

TINY = SpecialTokens(
    64,
    {
        "<|open|>": 52,
        "<|close|>": 53,
        "<|sep|>": 54,
        "<|media_begin|>": 55,
        "<|media_content|>": 56,
        "<|media_pad|>": 57,
        "<|media_end|>": 58,
        "[EOS]": 59,
        "[BOS]": 60,
        "<|end_of_msg|>": 61,
        "[UNK]": 62,
        "[PAD]": 63,
    },
)
