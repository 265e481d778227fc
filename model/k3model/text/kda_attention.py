"""Kimi Delta Attention: a linear recurrence with a decay of its own for every channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3kernels import selected
from k3model.kept_dtype import KeptDtype
from k3model.text.decay_gate import DecayGate
from k3model.text.documents import Documents
from k3model.text_config import KdaConfig


class ShortConvolution(KeptDtype):
    """A causal depthwise convolution with SiLU, reset at document starts. The weight stays float32."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, dtype=torch.float32))
        nn.init.uniform_(self.weight, -(kernel_size**-0.5), kernel_size**-0.5)
        self.short_conv = selected("short_conv_implementation")

    def forward(self, x_BTC: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """``[B, T, C]`` to ``[B, T, C]``, in the dtype of ``x``."""
        out: Tensor = self.short_conv(x_BTC, self.weight, cu_seqlens=cu_seqlens)[0]
        return out


class HeadNorm(KeptDtype):
    """RMSNorm of every head's output times a sigmoid gate, one weight for all heads. The weight stays float32."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim, dtype=torch.float32))
        self.eps = eps
        self.gated_rms_norm = selected("gated_rms_norm_implementation")

    def forward(self, o_BTHV: Tensor, gate_BTHV: Tensor) -> Tensor:
        """``[B, T, H, V]`` to ``[B, T, H, V]``, in the dtype of ``o``."""
        out: Tensor = self.gated_rms_norm(o_BTHV, gate_BTHV, self.weight, eps=self.eps)
        return out


class KdaAttention(nn.Module):
    """One KDA layer's attention.

    Per head, with a state ``S [K, V]`` and q, k normalised to length one:
    ``S <- diag(exp g) S``; ``S <- S + beta k (v - S^T k)^T``; ``o = S^T q / sqrt(K)``.

    Source: Kimi K3 report, section 2.1.1, equations 1 and 2.
    """

    def __init__(self, config: KdaConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        width, self.head_dim = config.width, config.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        self.q_conv1d = ShortConvolution(width, config.conv_kernel_size)
        self.k_conv1d = ShortConvolution(width, config.conv_kernel_size)
        self.v_conv1d = ShortConvolution(width, config.conv_kernel_size)
        self.f_a_proj = nn.Linear(hidden_size, config.head_dim, bias=False)
        self.f_b_proj = nn.Linear(config.head_dim, width, bias=False)
        self.decay = DecayGate(config)
        self.b_proj = nn.Linear(hidden_size, config.num_heads, bias=False)
        self.full_rank_gate = config.use_full_rank_gate
        if self.full_rank_gate:
            self.g_proj = nn.Linear(hidden_size, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden_size, config.head_dim, bias=False)
            self.g_b_proj = nn.Linear(config.head_dim, width, bias=False)
        self.o_norm = HeadNorm(config.head_dim, eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)
        self.kda = selected("chunk_kda_implementation")

    def forward(self, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T, hidden]`` to ``[B, T, hidden]``; zero at padding.

        Padding is taken out before anything is projected: a recurrence has no mask to hide it with.
        """
        batch, tokens = x_BTD.shape[:2]
        x = documents.pack(x_BTD)
        q = self._heads(self.q_conv1d(self.q_proj(x), documents.cu_seqlens))
        k = self._heads(self.k_conv1d(self.k_proj(x), documents.cu_seqlens))
        v = self._heads(self.v_conv1d(self.v_proj(x), documents.cu_seqlens))
        g = self.decay(self._heads(self.f_b_proj(self.f_a_proj(x))))
        logits = self.b_proj(x)
        beta = torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        o, _ = self.kda(q, k, v, g, beta, cu_seqlens=documents.cu_seqlens, lower_bound=self.decay.lower_bound)
        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        out: Tensor = self.o_proj(self.o_norm(o, self._heads(gate)).flatten(-2))
        return documents.unpack(out, batch, tokens)

    def _heads(self, x: Tensor) -> Tensor:
        """``[B, T, H * K]`` to ``[B, T, H, K]``."""
        return torch.unflatten(x, -1, (-1, self.head_dim))
