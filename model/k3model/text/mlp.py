"""The SiTU-gated feed-forward block: dense layers and shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from k3kernels import selected
from k3model.text_config import TextConfig


class Mlp(nn.Module):
    """``down(SiTU(gate(x), up(x)))``; SiTU is ``beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)``.

    Source: Kimi K3 report, section 2.3.
    """

    def __init__(self, config: TextConfig, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.beta = config.situ_beta
        self.linear_beta = config.situ_linear_beta
        self.situ_and_mul = selected("situ_and_mul_implementation")

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        activated = self.situ_and_mul(self.gate_proj(x), self.up_proj(x), beta=self.beta, linear_beta=self.linear_beta)
        out: Tensor = self.down_proj(activated)
        return out
