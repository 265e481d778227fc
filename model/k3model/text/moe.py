"""The mixture of experts: routed experts in a latent space, shared experts beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from k3kernels import selected
from k3model.norms import RMSNorm
from k3model.text.mlp import Mlp
from k3model.text.router import Router
from k3model.text_config import MoeConfig, TextConfig


class Experts(nn.Module):
    """All routed experts of a layer, each of its three matrices stacked along dim 0.

    Attributes:
        w1: gate ``[E, I, D]``.
        w3: up ``[E, I, D]``.
        w2: down ``[E, D, I]``.
        parallel_forward: how a parallel layout runs experts that lie on several ranks; None: all are here.
    """

    def __init__(self, config: TextConfig, moe: MoeConfig) -> None:
        super().__init__()
        model_side, expert_side = config.expert_input_size, moe.intermediate_size
        self.w1 = nn.Parameter(torch.empty(moe.num_experts, expert_side, model_side))
        self.w3 = nn.Parameter(torch.empty(moe.num_experts, expert_side, model_side))
        self.w2 = nn.Parameter(torch.empty(moe.num_experts, model_side, expert_side))
        for weight in (self.w1, self.w3, self.w2):
            nn.init.normal_(weight, std=config.initializer_range)
        self.beta = config.situ_beta
        self.linear_beta = config.situ_linear_beta
        self.moe_experts = selected("moe_implementation")
        self.parallel_forward: Callable[[Experts, Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, z_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """The weighted sum of every token's experts: ``[N, D]`` in the dtype of ``z``."""
        if self.parallel_forward is not None:
            return self.parallel_forward(self, z_ND, ids_NK, weights_NK)
        out: Tensor = self.moe_experts(
            z_ND, ids_NK, weights_NK, self.w1, self.w3, self.w2, beta=self.beta, linear_beta=self.linear_beta
        )
        return out


class SparseMoe(nn.Module):
    """``up(norm(sum_e weight_e * expert_e(down(x)))) + shared(x)``; the router reads ``x`` itself, not its latent.

    Source: Kimi K3 report, section 2.3.
    """

    def __init__(self, config: TextConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.gate = Router(moe, config.hidden_size)
        self.experts = Experts(config, moe)
        self.has_latent = moe.latent_size is not None
        if moe.latent_size is not None:
            self.routed_expert_down_proj = nn.Linear(config.hidden_size, moe.latent_size, bias=False)
            self.routed_expert_norm = RMSNorm(moe.latent_size, config.rms_norm_eps) if moe.latent_norm else None
            self.routed_expert_up_proj = nn.Linear(moe.latent_size, config.hidden_size, bias=False)
        self.shared_experts = (
            Mlp(config, moe.intermediate_size * moe.num_shared_experts) if moe.num_shared_experts else None
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``[B, T, hidden]`` to ``[B, T, hidden]``."""
        x_ND = x_BTD.flatten(0, -2)
        ids_NK, weights_NK = self.gate(x_ND)
        routed = self.routed_expert_down_proj(x_ND) if self.has_latent else x_ND
        routed = self.experts(routed, ids_NK, weights_NK)
        if self.has_latent:
            if self.routed_expert_norm is not None:
                routed = self.routed_expert_norm(routed)
            routed = self.routed_expert_up_proj(routed)
        out: Tensor = routed.view_as(x_BTD)
        return out if self.shared_experts is None else out + self.shared_experts(x_BTD)
