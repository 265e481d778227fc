"""Quantisation-aware training: experts compute with weights on the MXFP4 grid, gradients pass as if they were not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3kernels import K3Op
from k3model.text.moe import Experts

# What ``dcp-to-hf`` packs with when it is not told otherwise.
SCALE_RULE = "compressed-tensors"


class _OnGrid(torch.autograd.Function):
    """The nearest values that MXFP4 holds; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, quantize: K3Op, dequantize: K3Op) -> Tensor:
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for matrix, values in zip(out, weight, strict=True):  # one expert at a time: the codec works in float64
            packed, scale = quantize(values, rule=SCALE_RULE)
            matrix.copy_(dequantize(packed, scale, dtype=values.dtype))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class FakeQuantizedExperts:
    """An experts op whose three weights are rounded to MXFP4 first.

    Args:
        op: the op of the layer.
    """

    def __init__(self, op: K3Op) -> None:
        self.op = op
        self._quantize = K3Op("mxfp4", "quantize", "eager", op.device)
        self._dequantize = K3Op("mxfp4", "dequantize", "eager", op.device)

    def __call__(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, **attributes: Any
    ) -> Tensor:
        """As the op; ``w1``, ``w3`` ``[E, I, D]`` and ``w2`` ``[E, D, I]`` of whichever experts are here."""
        rounded = (on_grid(weight, self._quantize, self._dequantize) for weight in (w1, w3, w2))
        out: Tensor = self.op(x, topk_ids, topk_weights, *rounded, **attributes)
        return out


def on_grid(weight: Tensor, quantize: K3Op, dequantize: K3Op) -> Tensor:
    """The weight's nearest values on the MXFP4 grid, ``[E, O, I]`` in its dtype, with a straight-through gradient."""
    out: Tensor = _OnGrid.apply(weight, quantize, dequantize)  # type: ignore[no-untyped-call]
    return out


def quantize_experts(network: nn.Module) -> int:
    """Have every layer's experts compute on the grid; how many layers there are."""
    layers = [module for module in network.modules() if isinstance(module, Experts)]
    for experts in layers:
        experts.moe_experts = FakeQuantizedExperts(experts.moe_experts)  # type: ignore[assignment]  # called alike
    return len(layers)
