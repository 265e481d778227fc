"""Where the first NaN or infinity of a step comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.mesh import Mesh
from k3model.parallel.step import Batch, forward_backward


def find_nonfinite(network: KimiK3ForConditionalGeneration, mesh: Mesh, batches: Sequence[Batch]) -> str:
    """Run a step's forward pass again, with the same weights, and name what is not finite first. A collective.

    A parameter comes before the module that reads it, a module's output before those computed from it, a gradient last.
    The gradients of the step must still be there.
    """
    found = _first_parameter(network) or _first_output(network, mesh, batches) or _last_gradient(network)
    of_ranks: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    named = [f"{text} (rank {rank})" for rank, text in enumerate(of_ranks) if text]
    return named[0] if named else "nothing that a second pass shows"


def _first_parameter(network: nn.Module) -> str | None:
    for name, parameter in network.named_parameters():
        if not is_finite(parameter):
            return f"the parameter {name}"
    return None


def _first_output(network: KimiK3ForConditionalGeneration, mesh: Mesh, batches: Sequence[Batch]) -> str | None:
    found: list[str] = []

    def watch(name: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if not found and not all(is_finite(part) for part in parts if isinstance(part, Tensor)):
                found.append(f"the output of {name} ({type(module).__name__})")

        return module.register_forward_hook(hook)

    # The innermost module of those that end with it ends first.
    hooks = [watch(name or "the network", module) for name, module in network.named_modules()]
    try:
        forward_backward(network, mesh, batches, backward=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _last_gradient(network: nn.Module) -> str | None:
    """The backward pass goes from the last parameter to the first."""
    for name, parameter in reversed(list(network.named_parameters())):
        if parameter.grad is not None and not is_finite(parameter.grad):
            return f"the gradient of {name}"
    return None


def is_finite(tensor: Tensor) -> bool:
    """Whether this rank's part of a tensor holds no NaN and no infinity."""
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return bool(torch.isfinite(local).all()) if local.is_floating_point() else True
