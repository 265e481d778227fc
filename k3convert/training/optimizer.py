"""AdamW over the float32 masters, with moments that are there from the start."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3convert.training.recipe import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(network: nn.Module, settings: Optimizer, device_type: str) -> torch.optim.AdamW:
    """AdamW with decay on matrices alone.

    The state of every trained parameter exists at once, zeros laid out as the parameter is, so that a checkpoint can be
    loaded into it in place. Parameters of different meshes are in groups of their own: one call of a fused kernel takes
    tensors of one mesh.

    Raises:
        TypeError: a parameter is not float32; moments would inherit its rounding.
    """
    groups: dict[tuple[bool, int], list[Tensor]] = {}
    for name, parameter in trained(network):
        if parameter.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} is stored as {parameter.dtype}; masters are float32")
        mesh = id(parameter.device_mesh) if isinstance(parameter, DTensor) else 0
        groups.setdefault((parameter.dim() >= 2, mesh), []).append(parameter)
    is_fused = device_type == "cuda"
    optimizer = torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": settings.weight_decay if decays else 0.0}
            for (decays, _), parameters in groups.items()
        ],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        foreach=False,
        fused=is_fused,
    )
    for _, parameter in trained(network):
        counter = torch.zeros((), dtype=torch.float32, device=parameter.device if is_fused else "cpu")
        optimizer.state[parameter] = {
            "step": counter,
            **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
        }
    return optimizer


def trained(network: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that an optimizer changes; one that is used twice is named once."""
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
