"""Parameters by what they belong to: what is frozen, what decays, whose gradients are shown together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3convert.training.recipe import FrozenPart
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.gradients import split_experts
from k3model.parallel.mesh import Mesh

# The first group a fragment of whose names is in a parameter's name has it.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "vision": ("vision_tower.", "mm_projector."),
    "experts": (".block_sparse_moe.experts.",),
    "router": (".block_sparse_moe.gate.",),
    "shared experts": (".shared_experts.",),
    "residual mixing": ("_res_norm.", "_res_proj."),
    "attention": (".self_attn.",),
    "latent": (".routed_expert_",),
    "dense": (".mlp.",),
    "embedding": (".embed_tokens.",),
    "head": ("lm_head.",),
    "norms": ("norm.",),
}
FROZEN: Mapping[FrozenPart, str] = {FrozenPart.VISION: "vision", FrozenPart.EXPERTS: "experts"}


def group_of(name: str) -> str:
    """The group of a parameter.

    Raises:
        KeyError: it belongs to none.
    """
    for group, fragments in GROUPS.items():
        if any(fragment in name for fragment in fragments):
            return group
    raise KeyError(f"{name} belongs to no group of parameters")


def freeze(network: nn.Module, parts: Sequence[FrozenPart]) -> None:
    """Leave parts of a network as they are; before it is laid out."""
    groups = {FROZEN[part] for part in parts}
    for name, parameter in network.named_parameters():
        if group_of(name) in groups:
            parameter.requires_grad_(False)


def group_norms(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> dict[str, float]:
    """The 2-norm of the gradients of every trained group, over all ranks; a collective.

    The same sums as ``gradient_norm``, kept apart: shards of replicated tensors are not added up, experts once each.
    """
    experts = {id(parameter) for parameter in split_experts(network)[0]}
    names = list(GROUPS)
    device = next(network.parameters()).device
    # Row 0: of experts, row 1: of the others.
    squares = torch.zeros((2, len(names)), device=device)
    trained = torch.zeros(len(names), device=device)
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        column = names.index(group_of(name))
        trained[column] = 1
        if parameter.grad is not None:
            row = 0 if id(parameter) in experts else 1
            squares[row, column] += torch.linalg.vector_norm(_local(parameter.grad), dtype=squares.dtype).square()
    if mesh.layout.shards_parameters:
        dist.all_reduce(squares, group=mesh.group("data"))
    else:
        dist.all_reduce(squares[0], group=mesh.group("ep"))
    dist.all_reduce(squares, group=mesh.group("pp"))
    dist.all_reduce(trained, group=mesh.group("pp"))
    norms = squares.sum(0).sqrt().tolist()
    return {name: norm for name, norm, is_trained in zip(names, norms, trained.tolist(), strict=True) if is_trained}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
