"""One digest of all weights, as a network holds them: the same for every form of a checkpoint."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from blake3 import blake3

from k3convert.loading import load_model


@cache
def weights_digest(checkpoint: Path, num_layers: int | None) -> str:
    """BLAKE3 over name, dtype, shape and little-endian bytes of every tensor, by name."""
    hasher = blake3(max_threads=blake3.AUTO)
    network = load_model(checkpoint, num_layers=num_layers)
    for name, tensor in sorted(network.state_dict().items()):
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return str(hasher.hexdigest())
