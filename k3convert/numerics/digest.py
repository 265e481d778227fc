"""Digests of tensor bytes, and the digest of a stack from those of its experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

from blake3 import blake3

ALGORITHM = "blake3"
DIGEST_BYTES = 32

ByteBuffer = bytes | bytearray | memoryview


class Hasher(Protocol):
    """A running digest."""

    def update(self, data: ByteBuffer, /) -> object:
        """Take more bytes in."""

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""


def new() -> Hasher:
    """An empty running digest."""
    return cast(Hasher, blake3())


def digest_hex(*buffers: ByteBuffer) -> str:
    """The digest of these bytes, one buffer after the other."""
    hasher = new()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.hexdigest()


def stack_digest(digests: Iterable[str]) -> str:
    """The digest of a stack: that of its experts' digests, as raw bytes in the order of the expert ids."""
    return digest_hex(b"".join(bytes.fromhex(value) for value in digests))
