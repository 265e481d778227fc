"""The K3 tokenizer: tiktoken ranks and special tokens, read from a checkpoint folder."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from k3model.chat import render
from k3model.xtml import END_OF_MESSAGE, Segment

RANKS_FILE = "tiktoken.model"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CONFIG_FILE = "config.json"
NUM_SPECIAL_TOKENS = 256

# tiktoken panics on longer texts, and its regular expression is quadratic in the length of a run.
_MAX_CHARACTERS = 400_000
_MAX_RUN = 25_000

_OTHER_START = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# How text is cut before pairs merge: Han runs, words with their contraction, up to three digits, punctuation, spaces.
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_OTHER_START}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_OTHER_START}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class EncodedChat(NamedTuple):
    """Token ids of a conversation, and for each whether a training loss counts it."""

    input_ids: list[int]
    loss_mask: list[bool]


class KimiTokenizer:
    """Text to token ids and back.

    Attributes:
        special_tokens: name to id of the special tokens, which follow the ranks; unnamed ones are
            ``<|reserved_token_ID|>``.
    """

    def __init__(
        self, ranks: Mapping[bytes, int], special_names: Mapping[int, str], num_special: int = NUM_SPECIAL_TOKENS
    ) -> None:
        """Build from ranks, the names of special ids, and how many special ids there are.

        Raises:
            ValueError: the ranks are not 0..N-1, or a name belongs to no special id.
        """
        import tiktoken

        num_ranks = len(ranks)
        if set(ranks.values()) != set(range(num_ranks)):
            raise ValueError(f"{num_ranks} token ranks must be 0..{num_ranks - 1} without a gap")
        special_ids = range(num_ranks, num_ranks + num_special)
        outside = sorted(set(special_names) - set(special_ids))
        if outside:
            raise ValueError(f"special ids {outside[:5]} are outside {special_ids.start}..{special_ids.stop - 1}")
        self.num_ranks = num_ranks
        self.special_tokens = {special_names.get(i, f"<|reserved_token_{i}|>"): i for i in special_ids}
        self._encoding = tiktoken.Encoding(
            name="kimi_k3", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=self.special_tokens
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> KimiTokenizer:
        """Read ``tiktoken.model``, the special names of ``tokenizer_config.json`` and the vocabulary's size.

        Raises:
            FileNotFoundError: the folder has no ``tiktoken.model``.
            ValueError: a line of it is no token and rank.
        """
        folder = Path(folder)
        added: dict[str, Any] = _read_json(folder / TOKENIZER_CONFIG_FILE).get("added_tokens_decoder", {})
        names = {int(token_id): str(token["content"]) for token_id, token in added.items()}
        ranks = read_ranks(folder / RANKS_FILE)
        return cls(ranks, names, num_special_tokens(folder, len(ranks)))

    @property
    def vocab_size(self) -> int:
        """Ranks and special tokens together."""
        return int(self._encoding.n_vocab)

    @property
    def end_of_message_id(self) -> int:
        """The id that ends a turn, where generation stops."""
        return self.special_tokens[END_OF_MESSAGE]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of a text; special tokens written in it count only with ``allow_special``."""
        token_ids: list[int] = []
        for piece in _short_pieces(text):
            if allow_special:
                token_ids += self._encoding.encode(piece, allowed_special="all")
            else:
                token_ids += self._encoding.encode_ordinary(piece)
        return token_ids

    def encode_segments(self, segments: Iterable[Segment]) -> EncodedChat:
        """Token ids of a conversation's pieces, each tokenized on its own."""
        encoded = EncodedChat([], [])
        for segment in segments:
            token_ids = self.encode(segment.text, allow_special=segment.is_control)
            encoded.input_ids.extend(token_ids)
            encoded.loss_mask.extend([segment.is_trained] * len(token_ids))
        return encoded

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> EncodedChat:
        """Token ids and loss mask of a conversation; ``options`` are those of ``k3model.chat.render``."""
        return self.encode_segments(render(messages, **options))

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 read as U+FFFD."""
        kept = [token_id for token_id in token_ids if not (skip_special and token_id >= self.num_ranks)]
        return str(self._encoding.decode(kept))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for."""
        return bytes(self._encoding.decode_single_token_bytes(token_id))


def num_special_tokens(folder: Path, num_ranks: int) -> int:
    """How many ids follow the ranks: what ``config.json`` leaves of the vocabulary, or 256 where there is none."""
    vocab_size = _read_json(folder / CONFIG_FILE).get("text_config", {}).get("vocab_size")
    return NUM_SPECIAL_TOKENS if vocab_size is None else int(vocab_size) - num_ranks


def _read_json(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not isinstance(document, dict):
        raise ValueError(f"{path} is no JSON object")
    return document


def read_ranks(path: Path) -> dict[bytes, int]:
    """The ranks of a tiktoken file: lines of a base64 token and its rank.

    Raises:
        ValueError: a line is something else; the message names it.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"{path} line {number} is no token and rank: {line[:40]!r}") from None
    return ranks


def _short_pieces(text: str) -> Iterator[str]:
    """Cut a text where the released tokenizer cuts it: never inside ordinary text, only in enormous ones."""
    for start in range(0, len(text), _MAX_CHARACTERS):
        chunk = text[start : start + _MAX_CHARACTERS]
        if len(chunk) <= _MAX_RUN:
            yield chunk
            continue
        piece_start = position = 0
        for _, run in groupby(chunk, key=str.isspace):
            run_length = sum(1 for _ in run)
            for cut in range(position + _MAX_RUN, position + run_length, _MAX_RUN):
                yield chunk[piece_start:cut]
                piece_start = cut
            position += run_length
        yield chunk[piece_start:]
