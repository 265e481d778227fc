"""What a checkpoint of a network in its layout holds, in the form that torch DCP saves and loads in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.mesh import Mesh

HEAD = "language_model.lm_head.weight"


def sharded_state(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's part of every parameter and persistent buffer, by name.

    Names and global shapes are those of the whole network under every layout, so that what one layout saves another
    loads. Tensors share the network's memory: loading into them loads the network. A pipeline stage has its own names
    alone; a head that is the embedding's parameter has none.

    Args:
        network: as ``parallelize`` left it, its weights on a device.
        mesh: the layout's.

    Returns:
        A DTensor where ranks hold different parts, a plain tensor where each holds all of it.

    Raises:
        ValueError: tensors whose parts lie in an order that no checkpoint can tell; see ``permuted``.
    """
    state = {name: _stored(tensor, mesh) for name, tensor in network.state_dict().items()}
    if network.language_model.is_tied:
        state.pop(HEAD, None)
    return _checked(state)


def optimizer_state(network: KimiK3ForConditionalGeneration, optimizer: Optimizer, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's part of everything that an optimizer remembers: ``<name of the parameter>.<name of the state>``.

    As ``sharded_state``, to be saved and loaded in place. Parameters that the optimizer has not stepped yet get the
    state that it starts from, so that a new optimizer has something to load into, and every layout the same names.

    Raises:
        ValueError: the optimizer has parameters that are not the network's, or parts lie as in ``sharded_state``.
        TypeError: it remembers something other than tensors.
    """
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := sum(id(parameter) not in names for parameter in parameters):
        raise ValueError(f"{foreign} of the optimizer's {len(parameters)} parameters are not the network's")
    _begin_missing(optimizer)
    state: dict[str, Tensor] = {}
    for parameter in parameters:
        for key, value in optimizer.state[parameter].items():
            name = f"{names[id(parameter)]}.{key}"
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
            state[name] = _stored(value, mesh)
    return _checked(state)


def permuted(tensor: Tensor) -> bool:
    """Whether two axes cut the same dim of a tensor, one inside the other.

    The order of the cuts is then not that of the axes, and a checkpoint written in the order of the axes is permuted
    in blocks: nothing notices while the same layout loads it, and every other layout loads other numbers. Experts are
    cut along dim 0 by ``ep`` and along dim 1 by ``ep_fsdp`` for that reason.
    """
    if not isinstance(tensor, DTensor):
        return False
    cuts = [
        placement.dim  # type: ignore[attr-defined]
        for placement, degree in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if placement.is_shard() and degree > 1
    ]
    return len(set(cuts)) < len(cuts)


def _stored(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Without the DTensor that FSDP makes on a mesh of one rank, where it shards nothing and is there for its casts."""
    if isinstance(tensor, DTensor) and not mesh.layout.shards_parameters and tensor.device_mesh.size() == 1:
        return tensor.to_local()
    return tensor


def _checked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if offenders := [name for name, tensor in state.items() if permuted(tensor)]:
        raise ValueError(
            f"{len(offenders)} tensors are cut twice along one dim, which would permute their blocks: {offenders[:3]}"
        )
    return dict(state)


@torch.no_grad()
def _begin_missing(optimizer: Optimizer) -> None:
    """Give parameters without state the one they start from: that of a step of zero size, which is then not counted."""
    missing = {
        id(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    }
    if not missing:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if id(parameter) in missing else None
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for parameter in parameters:
        if id(parameter) in missing and "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"].zero_()
