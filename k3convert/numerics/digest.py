"""Digests of tensor bytes, and the digest of a stack from those of its experts."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

ALGORITHM = "blake3"
DIGEST_BYTES = 32

Bytes = bytes | bytearray | memoryview
"""Contiguous bytes (a uint8 array's are ``array.data``); large ones are hashed without the interpreter lock."""


Hasher = blake3
"""A running digest: ``update`` and ``hexdigest``."""


def new() -> Hasher:
    """Start a digest. It uses the calling thread alone: workers are the converter's own."""
    return blake3(max_threads=1)


def digest_hex(*buffers: Bytes) -> str:
    """The digest of several buffers' bytes, one after the other."""
    running = new()
    for buffer in buffers:
        running.update(buffer)
    return running.hexdigest()


def stack_digest(expert_digests: Iterable[str]) -> str:
    """The digest of a stacked tensor: of its experts' digests, 32 bytes each, in id order.

    Raises:
        ValueError: one of them is no digest of ``DIGEST_BYTES`` bytes in hexadecimal.
    """
    running = new()
    for expert, text in enumerate(expert_digests):
        digest = bytes.fromhex(text)
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"the digest of expert {expert} has {len(digest)} bytes, wanted {DIGEST_BYTES}")
        running.update(digest)
    return running.hexdigest()
