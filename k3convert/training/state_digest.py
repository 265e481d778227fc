"""A digest of everything that a step changes, bit by bit."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3convert.numerics.digest import new
from k3convert.training.optimizer import MOMENTS


def state_digest(network: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Of parameters, buffers and moments: one digest a rank, of its own parts. A collective."""
    running = new()
    for tensor in network.state_dict().values():
        running.update(_bytes(tensor))
    for parameter in network.parameters():
        for moment in MOMENTS:
            if moment in optimizer.state.get(parameter, {}):
                running.update(_bytes(optimizer.state[parameter][moment]))
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, running.hexdigest())
    return tuple(digests)


def _bytes(tensor: Tensor) -> bytes:
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return local.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
