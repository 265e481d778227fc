"""Random numbers that depend on the seed and a tensor's name alone, so that tensors can be made in any order."""

from __future__ import annotations

import hashlib

import numpy as np


def random_stream(seed: int, name: str) -> np.random.Generator:
    """A generator of its own for one tensor (one expert matrix for a packed pair)."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
