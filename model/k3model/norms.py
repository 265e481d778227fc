"""RMS norms in the two roundings that K3 has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3kernels import K3Op, selected


class RMSNorm(nn.Module):
    """The text decoder's norm: ``weight * cast(x / rms(x))``, the cast before the weight.

    Args:
        size: width of the normalised dim.
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.norm = selected("rms_norm_implementation")

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to ``[..., size]``, in the dtype of ``x``."""
        out: Tensor = self.norm(x, self.weight, eps=self.eps)
        return out


class TorchRMSNorm(nn.Module):
    """The vision norm: ``cast(weight * x / rms(x))``, as ``torch.nn.RMSNorm`` rounds.

    Args:
        size: width of the normalised dim.
        eps: added to the mean square. Without one torch uses the machine epsilon of the accumulation type, float32.
    """

    def __init__(self, size: int, eps: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = torch.finfo(torch.float32).eps if eps is None else eps
        self.norm = K3Op("rms_norm", "torch", "eager")

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to ``[..., size]``, in the dtype of ``x``."""
        out: Tensor = self.norm(x, self.weight, eps=self.eps)
        return out
