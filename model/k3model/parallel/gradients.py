"""Gradients over the ranks of a layout: their sum, their one norm, their clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.mesh import Mesh
from k3model.text.moe import Experts


def split_experts(network: KimiK3ForConditionalGeneration) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters of all experts, and the others; a parameter that is used twice is named once."""
    of_experts = {
        id(parameter)
        for module in network.modules()
        if isinstance(module, Experts)
        for parameter in module.parameters()
    }
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [p for p in trained if id(p) in of_experts], [p for p in trained if id(p) not in of_experts]


def sum_gradients(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> None:
    """Sum the gradients of replicated parameters over the ranks that hold copies of them, in place.

    Experts are summed over the ranks with the same experts, everything else over all ranks of the stage. A parameter
    that nothing reached gets zeros, so that every rank enters every collective, and so that an optimizer sees the same
    parameters under every layout. Gradients of parameters that FSDP shards are summed by its backward already.
    """
    experts, others = split_experts(network)
    for parameters, axis in ((experts, "ep_fsdp"), (others, "data")):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not mesh.layout.shards_parameters:
                dist.all_reduce(_local(parameter.grad), group=mesh.group(axis))


def gradient_norm(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> Tensor:
    """The 2-norm of all gradients of the global batch: 0-d, the same on every rank.

    Sums of squares of the rank's own shards, then one sum over the ranks that hold the other shards of the same
    tensors, experts once each, then one sum over the stages. Which collectives a rank enters follows from the layout
    alone: a stage without gradients enters all of them.
    """
    layout = mesh.layout
    experts, others = split_experts(network)
    # Of the parameters, not of the gradients: ranks without any must agree with the others.
    dtype = torch.float32
    for parameter in network.parameters():
        dtype = torch.promote_types(dtype, parameter.dtype)
    zero = torch.zeros((), dtype=dtype, device=next(network.parameters()).device)
    expert_squares, other_squares = _sum_of_squares(experts, zero), _sum_of_squares(others, zero)
    if layout.shards_parameters:
        dist.all_reduce(other_squares, group=mesh.group("data"))
        dist.all_reduce(expert_squares, group=mesh.group("data"))
    else:
        dist.all_reduce(expert_squares, group=mesh.group("ep"))
    total = expert_squares + other_squares
    dist.all_reduce(total, group=mesh.group("pp"))
    return total.sqrt()


def clip_gradients(network: KimiK3ForConditionalGeneration, mesh: Mesh, max_norm: float) -> Tensor:
    """Scale all gradients so that their one norm is at most ``max_norm``; the norm before that is returned."""
    norm = gradient_norm(network, mesh)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in network.parameters():
        if parameter.grad is not None:
            local = _local(parameter.grad)
            local.mul_(scale.to(local.dtype))
    return norm


def _sum_of_squares(parameters: Iterable[nn.Parameter], like: Tensor) -> Tensor:
    """Of the rank's own shards of all gradients, in the dtype and on the device of ``like``."""
    total = torch.zeros_like(like)
    for parameter in parameters:
        if parameter.grad is not None:
            total += torch.linalg.vector_norm(_local(parameter.grad), dtype=like.dtype).square()
    return total


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
