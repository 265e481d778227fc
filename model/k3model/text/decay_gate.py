"""The decay of a KDA layer and its two parameters, in a module of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3kernels import selected
from k3model.kept_dtype import KeptDtype
from k3model.text_config import KdaConfig

ALL = slice(None)


class DecayGate(KeptDtype):
    """``g = bound * sigmoid(exp(A_log) * (z + dt_bias))``, or ``-exp(A_log) * softplus(z + dt_bias)`` without a bound.

    The parameters stay float32 and are used in this module's forward only, so that a sharding library can treat the
    module as a unit of that dtype. Files have no name for the holder: ``self_attn.A_log``, ``self_attn.dt_bias``.

    Source: Kimi K3 report, section 2.1.1, equations 5 and 6.
    """

    def __init__(self, config: KdaConfig) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(config.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(config.width, dtype=torch.float32))
        self.lower_bound = config.gate_lower_bound
        self.kda_gate = selected("kda_gate_implementation")

    def forward(self, z_BTHK: Tensor, heads: slice = ALL) -> Tensor:
        """The natural logarithm of the decay, ``[B, T, H, K]`` float32, below zero.

        Args:
            z_BTHK: pre-activation of some heads or of all.
            heads: which heads these are.
        """
        dt_bias_HK = self.dt_bias.view(self.A_log.shape[0], -1)[heads]
        out: Tensor = self.kda_gate(z_BTHK, self.A_log[heads], dt_bias_HK.flatten(), lower_bound=self.lower_bound)
        return out
