"""Attention residuals: what a sublayer reads is a learned mix over depth."""

from __future__ import annotations

from torch import Tensor, nn

from k3kernels import selected
from k3model.norms import RMSNorm


class ResidualMix:
    """Calls the mix over the finished blocks and the running sum with one sublayer's norm and query.

    With sources ``V_i`` (blocks oldest first, then the running sum): ``out = sum_i softmax_i(<V_i / rms(V_i),
    norm * query>) V_i``. The modules stay children of the layer, which is where files name them.

    Source: Kimi K3 report, section 2.2, equations 8 to 10.
    """

    def __init__(self) -> None:
        self.attn_res = selected("attn_res_implementation")

    def __call__(self, prefix: Tensor, bank: tuple[Tensor, ...], norm: RMSNorm, query: nn.Linear) -> Tensor:
        """Mix ``prefix`` and ``bank``, all ``[B, T, hidden]``, to one ``[B, T, hidden]``."""
        out: Tensor = self.attn_res(prefix, norm.weight, query.weight, *bank, eps=norm.eps)
        return out
