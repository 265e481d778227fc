"""FSDP2 units of the network: one a layer, and one of its own for every module that stays float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from k3model.kept_dtype import KeptDtype
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.mesh import UnitMeshes
from k3model.text.moe import Experts
from k3model.text.router import Router


def shard_parameters(
    network: KimiK3ForConditionalGeneration, meshes: UnitMeshes, compute_dtype: torch.dtype | None = None
) -> None:
    """Shard every parameter in place; experts first where ``ep`` shards them already.

    Units are the decoder layers, the embedding, the head, and the root with everything else. An FSDP unit has one
    storage dtype and one to compute in, so that decay, convolutions and head norms, which stay float32, are units
    inside their layer's. Experts are a unit over ``ep_fsdp``, cut along dim 1: dim 0 is the experts', and a second cut
    of it would permute the global tensor. Gradients are reduced in float32 at least, and summed, not averaged.

    Args:
        network: as it is on this rank otherwise; may be on ``meta``.
        meshes: over which ranks units lie; over one rank each, they are there for their casts alone.
        compute_dtype: what parameters are cast to where a unit gathers them, but for those that stay float32; None
            computes in the storage dtype. Activations are never cast.
    """
    for module in list(network.modules()):
        if isinstance(module, Experts):
            fully_shard(
                module,
                mesh=meshes.experts,
                shard_placement_fn=lambda parameter: Shard(1),
                mp_policy=_precision(module, compute_dtype),
            )
        elif isinstance(module, KeptDtype) and not isinstance(module, Router):
            fully_shard(module, mesh=meshes.dense, mp_policy=_precision(module, None))
    text = network.language_model
    units: list[nn.Module] = list(text.model.layers.values())
    if not text.is_tied:
        units += [text.model.embed_tokens] if network.is_first_stage else []
        units += [text.lm_head] if network.is_last_stage else []
    for unit in (*units, network):
        fully_shard(unit, mesh=meshes.dense, mp_policy=_precision(unit, compute_dtype))
    if network.config.vision is not None and network.is_first_stage:
        network.without_images = ReachedVision(network.vision_tower, network.mm_projector)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A plain sum: gloo has no reduction that scales, and there is nothing to scale by.
            module.set_force_sum_reduction_for_comms(True)


class _Reached(torch.autograd.Function):
    """The identity, whose gradient for every parameter beside it is zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class ReachedVision:
    """Gives the vision parameters a gradient of zeros on a rank whose batch has no image.

    FSDP2 reduces the gradients that a rank has: without some of them its message is shorter than the others'.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = modules

    def __call__(self, embeddings_BTD: Tensor) -> Tensor:
        """The embeddings as they are; inside the root's forward, where parameters are whole."""
        trained = [p for module in self.modules for p in module.parameters() if p.requires_grad]
        out: Tensor = _Reached.apply(embeddings_BTD, *trained)  # type: ignore[no-untyped-call]
        return out


def _precision(module: nn.Module, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Reduce gradients in float32, or in float64 where that is the parameters' dtype.

    Inputs are not cast: experts get the router's weights in float32.
    """
    reduce_dtype = torch.float32
    for parameter in module.parameters():
        reduce_dtype = torch.promote_types(reduce_dtype, parameter.dtype)
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
