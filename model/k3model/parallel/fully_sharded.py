"""FSDP2 units of the network: one a block, and one of its own for every module that stays float32."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from k3model.kept_dtype import KeptDtype
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.mesh import Mesh
from k3model.text.moe import Experts
from k3model.text.router import Router


def shard_parameters(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> None:
    """Shard every parameter in place; experts first where ``ep`` shards them already.

    Units are the decoder layers, the embedding, the head, and the root with everything else. An FSDP unit has one
    storage dtype, so that decay, convolutions and head norms, which stay float32, are units inside their layer's.
    Experts are a unit over ``ep_fsdp``, cut along dim 1: dim 0 is the experts', and a second cut of it would permute
    the global tensor. Gradients are reduced in float32 at least, and summed, not averaged.
    """
    for module in list(network.modules()):
        if isinstance(module, Experts):
            fully_shard(
                module,
                mesh=mesh.expert["ep_fsdp"],
                shard_placement_fn=lambda parameter: Shard(1),
                mp_policy=_precision(module),
            )
        elif isinstance(module, KeptDtype) and not isinstance(module, Router):
            fully_shard(module, mesh=mesh.data, mp_policy=_precision(module))
    text = network.language_model
    units: list[nn.Module] = list(text.model.layers.values())
    if not text.is_tied:
        units += [text.model.embed_tokens, text.lm_head]
    for unit in (*units, network):
        fully_shard(unit, mesh=mesh.data, mp_policy=_precision(unit))
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A plain sum: gloo has no reduction that scales, and there is nothing to scale by.
            module.set_force_sum_reduction_for_comms(True)


def _precision(module: nn.Module) -> MixedPrecisionPolicy:
    """Reduce gradients in float32, or in float64 where that is the parameters' dtype."""
    reduce_dtype = torch.float32
    for parameter in module.parameters():
        reduce_dtype = torch.promote_types(reduce_dtype, parameter.dtype)
    return MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
