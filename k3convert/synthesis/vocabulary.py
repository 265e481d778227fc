"""A byte-pair vocabulary of our own in tiktoken's file format: any size, no corpus, the same every time."""

from __future__ import annotations

import base64
import string
from collections.abc import Iterator
from itertools import islice, product

# Words of the chat format and the commonest English ones. A leading space belongs to the token.
_WORDS = (
    " the and message role user assistant system think response to of a in is it you that for on are with as "
    'tool call index type string number =" " name .\n'
)
_LONGEST_COMBINATION = 4


def rank_lines(num_ranks: int) -> Iterator[bytes]:
    """The lines of ``tiktoken.model``: a token in base64, a space, its rank.

    Raises:
        ValueError: fewer ranks than there are bytes, or more than this generator has tokens.
    """
    if num_ranks < 256:
        raise ValueError(f"{num_ranks} ranks cannot hold the 256 single bytes")
    rank = -1
    for rank, token in enumerate(islice(tokens(), num_ranks)):
        yield base64.b64encode(token) + b" %d\n" % rank
    if rank + 1 != num_ranks:
        raise ValueError(f"{num_ranks} ranks were asked for, this vocabulary has {rank + 1}")


def tokens() -> Iterator[bytes]:
    """Distinct tokens in the order of their ranks: bytes, pieces of common words, then letter combinations.

    Every token of two bytes or more is an earlier token and one more byte, so that byte pairs can build it.
    """
    seen: set[bytes] = set()
    for token in _candidates():
        if token not in seen:
            seen.add(token)
            yield token


def _candidates() -> Iterator[bytes]:
    for value in range(256):
        yield bytes((value,))
    for word in _WORDS.split(" "):
        for spaced in (f" {word}", word):
            for end in range(2, len(spaced) + 1):
                yield spaced[:end].encode()
    letters = string.ascii_lowercase
    for length in range(2, _LONGEST_COMBINATION + 1):
        for combination in product(letters, repeat=length):
            yield "".join(combination).encode()
