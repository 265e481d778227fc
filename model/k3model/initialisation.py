"""Random weights for training from scratch: one rule a kind of module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from k3model.norms import RMSNorm, TorchRMSNorm
from k3model.text.decay_gate import DecayGate
from k3model.text.kda_attention import HeadNorm, ShortConvolution
from k3model.text.moe import Experts
from k3model.text.router import Router
from k3model.vision.positions import PositionGrid

_A_RANGE = (1.0, 16.0)

Fill = Callable[[nn.Module, float], None]


def _linear(module: nn.Module, std: float) -> None:
    _normal(module.weight, std)


def _embedding(module: nn.Module, std: float) -> None:
    _normal(module.weight, std)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        _tensor(module.weight)[module.padding_idx].zero_()


def _ones(module: nn.Module, std: float) -> None:
    _tensor(module.weight).fill_(1.0)


def _convolution(module: nn.Module, std: float) -> None:
    weight = _tensor(module.weight)
    bound = weight.shape[-1] ** -0.5
    weight.uniform_(-bound, bound)


def _decay(module: nn.Module, std: float) -> None:
    _tensor(module.A_log).uniform_(*_A_RANGE).log_()
    _tensor(module.dt_bias).zero_()


def _experts(module: nn.Module, std: float) -> None:
    for name in ("w1", "w3", "w2"):
        _normal(getattr(module, name), std)


def _router(module: nn.Module, std: float) -> None:
    _normal(module.weight, std)
    _tensor(module.e_score_correction_bias).zero_()


# The first kind that fits decides; a module with tensors of its own that no rule fits is an error.
RULES: tuple[tuple[type[nn.Module], Fill], ...] = (
    (nn.Embedding, _embedding),
    (RMSNorm, _ones),
    (TorchRMSNorm, _ones),
    (HeadNorm, _ones),
    (ShortConvolution, _convolution),
    (DecayGate, _decay),
    (Router, _router),
    (Experts, _experts),
    (PositionGrid, _linear),
    (nn.Linear, _linear),
    (nn.Conv2d, _linear),
)


@torch.no_grad()
def initialise(network: nn.Module, std: float) -> None:
    """Fill every parameter and buffer; draws come from torch's global generator.

    Linear maps, embeddings and experts are normal with ``std`` (the padding row zero), norms one, the decay's
    ``exp(A_log)`` uniform in 1..16 and its bias zero, convolutions uniform within ``kernel ** -0.5``.

    Raises:
        TypeError: a module has tensors of its own and no rule says how to fill them.
    """
    for name, module in network.named_modules():
        has_tensors = any(True for _ in module.parameters(recurse=False)) or any(
            True for _ in module.buffers(recurse=False)
        )
        if not has_tensors:
            continue
        fill = next((fill for kind, fill in RULES if isinstance(module, kind)), None)
        if fill is None:
            raise TypeError(f"no rule says how to initialise {name or 'the network'} ({type(module).__name__})")
        fill(module, std)


def _tensor(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"expected a tensor, got {type(value).__name__}")
    return value


def _normal(value: object, std: float) -> None:
    _tensor(value).normal_(0.0, std)
