"""Gated multi-head latent attention without positions."""

from __future__ import annotations

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

    def forward(self, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T, hidden]`` to ``[B, T, hidden]``; zero at padding."""
        config = self.config
        q = self._heads(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD))))
        latent, shared = torch.split(
            self.kv_a_proj_with_mqa(x_BTD), [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        key_value = self._heads(self.kv_b_proj(self.kv_a_layernorm(latent)))
        k_own, v = torch.split(key_value, [config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        k = torch.cat((k_own, shared[:, :, None].expand(-1, -1, config.num_heads, -1)), dim=-1)
        o = self.attention(q, k, v, scale=self.scale, **documents.attention_arguments()).flatten(-2)
        if config.use_output_gate:
            o = o * torch.sigmoid(self.g_proj(x_BTD))
        out: Tensor = self.o_proj(o)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """``[B, T, H * K]`` to ``[B, T, H, K]``."""
        return torch.unflatten(x, -1, (self.config.num_heads, -1))
