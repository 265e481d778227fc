"""Gated multi-head latent attention without positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from k3kernels import selected
from k3model.norms import RMSNorm
from k3model.text.documents import Documents
from k3model.text_config import MlaConfig

# Not rms_norm_eps: the released network builds the two latent norms without passing its config's value.
LATENT_NORM_EPS = 1e-6


class MlaAttention(nn.Module):
    """One MLA layer's attention: low-rank queries, low-rank keys and values, a sigmoid gate on the output.

    The last ``qk_rope_head_dim`` channels of every key are shared by all heads; nothing is rotated.

    Attributes:
        parallel_forward: how a parallel layout runs this layer on its share of the tokens; None: all tokens are here.

    Source: Kimi K3 report, section 2.1.2.
    """

    def __init__(self, config: MlaConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        value_width = config.num_heads * config.v_head_dim
        key_value_width = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.q_a_proj = nn.Linear(hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = nn.Linear(config.q_lora_rank, config.num_heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, key_value_width, bias=False)
        if config.use_output_gate:
            self.g_proj = nn.Linear(hidden_size, value_width, bias=False)
        self.o_proj = nn.Linear(value_width, hidden_size, bias=False)
        self.scale = config.qk_head_dim**-0.5
        self.attention = selected("attn_implementation")
        self.parallel_forward: Callable[[MlaAttention, Tensor, Documents], Tensor] | None = None

    def forward(self, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T, hidden]`` to ``[B, T, hidden]``; zero at padding."""
        if self.parallel_forward is not None:
            return self.parallel_forward(self, x_BTD, documents)
        latent, shared = self.compress(x_BTD)
        return self.output(self.mix(self.queries(x_BTD), self.expand(latent), shared, documents), x_BTD)

    def queries(self, x: Tensor) -> Tensor:
        """``[B, T, hidden]`` to ``[B, T, H, Dk]``."""
        return self._heads(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))

    def compress(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, hidden]`` to the latent ``[B, T, rank]`` and the key channels that all heads share."""
        config = self.config
        latent, shared = torch.split(self.kv_a_proj_with_mqa(x), [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        return latent, shared

    def expand(self, latent: Tensor) -> Tensor:
        """The latent to every head's own key channels and values, side by side: ``[B, S, H, nope + Dv]``."""
        return self._heads(self.kv_b_proj(self.kv_a_layernorm(latent)))

    def expand_heads(self, latent: Tensor, heads: slice) -> Tensor:
        """As ``expand``, of some heads."""
        weight_HCR = torch.unflatten(self.kv_b_proj.weight, 0, (self.config.num_heads, -1))[heads]
        expanded = nn.functional.linear(self.kv_a_layernorm(latent), weight_HCR.flatten(0, 1))
        return torch.unflatten(expanded, -1, (weight_HCR.shape[0], -1))

    def mix(
        self, q: Tensor, key_value: Tensor, shared: Tensor, documents: Documents, *, query_start: int = 0
    ) -> Tensor:
        """Attention of some heads or all.

        Args:
            q: ``[B, T, H, Dk]``.
            key_value: ``[B, S, H, nope + Dv]``.
            shared: ``[B, S, Dk - nope]``.
            documents: of the ``S`` keys.
            query_start: key position of the first query.

        Returns:
            ``[B, T, H, Dv]``.
        """
        config = self.config
        k_own, v = torch.split(key_value, [config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        k = torch.cat((k_own, shared[:, :, None].expand(-1, -1, key_value.shape[2], -1)), dim=-1)
        out: Tensor = self.attention(
            q, k, v, scale=self.scale, query_start=query_start, **documents.attention_arguments()
        )
        return out

    def output(self, o_BTHV: Tensor, x: Tensor) -> Tensor:
        """Gate, and project back: ``[B, T, hidden]``."""
        o = o_BTHV.flatten(-2)
        if self.config.use_output_gate:
            o = o * torch.sigmoid(self.g_proj(x))
        out: Tensor = self.o_proj(o)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """``[B, T, H * K]`` to ``[B, T, H, K]``."""
        return torch.unflatten(x, -1, (self.config.num_heads, -1))
