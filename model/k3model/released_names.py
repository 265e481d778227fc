"""A network's tensors under the names of the release, and how a stored form fits them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_EXPERTS = ".block_sparse_moe.experts."
_HOLDER = ".decay."


def released_views(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer with its released name; an expert's matrix is a view of its stack."""
    for fqn, tensor in network.state_dict().items():
        if _EXPERTS in fqn:
            prefix, matrix = fqn.rsplit(".", 1)
            for expert in range(tensor.shape[0]):
                yield f"{prefix}.{expert}.{matrix}.weight", tensor[expert]
        else:
            yield fqn.replace(_HOLDER, "."), tensor


@torch.no_grad()
def copy_stored(name: str, stored: Tensor, out: Tensor) -> None:
    """Copy a stored tensor into its place: ``A_log`` may be padded with zeros, a convolution may lack its middle dim.

    Raises:
        ValueError: the shapes do not fit, or the padding is not zero.
    """
    if name.endswith(".A_log") and stored.dim() == 1 and stored.numel() > out.numel():
        if bool((stored[out.numel() :] != 0).any()):
            raise ValueError(f"{name}: the entries behind its {out.numel()} heads are not all zero")
        stored = stored[: out.numel()]
    if stored.shape != out.shape and not (name.endswith("_conv1d.weight") and stored.numel() == out.numel()):
        raise ValueError(f"{name}: stored {list(stored.shape)}, the network has {list(out.shape)}")
    out.copy_(stored.view(out.shape))
