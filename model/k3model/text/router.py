"""The router: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from k3model.kept_dtype import KeptDtype
from k3model.text_config import MoeConfig

# Keeps the sum of all-zero scores from dividing by zero; part of the released arithmetic.
_SUM_FLOOR = 1e-20


class Router(KeptDtype):
    """Scores every expert in float32, selects by score plus correction bias, weighs by the score alone.

    The correction bias is a buffer: no gradient reaches it, and it stays float32 because rounding it reorders experts.

    Source: Kimi K3 report, section 2.3.3.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: MoeConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def kept_tensors(self) -> Iterable[Tensor]:
        """The bias alone; the weight is cast like any other and upcast when it is used."""
        yield self.e_score_correction_bias

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Route ``N`` tokens.

        Args:
            x_ND: ``[N, hidden]``.

        Returns:
            Expert ids int64 ``[N, k]`` in no particular order, and their weights ``[N, k]`` in float32.
        """
        scores_NE = self.scores(x_ND)
        ids_NK = self.select(self.choice(scores_NE))
        weights_NK = scores_NE.gather(1, ids_NK)
        if self.config.renormalize and self.config.num_experts_per_token > 1:
            weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + _SUM_FLOOR)
        return ids_NK, weights_NK * self.config.routed_scaling_factor

    def scores(self, x_ND: Tensor) -> Tensor:
        """Every expert's own score of every token, ``[N, E]`` in float32: what weights are made of."""
        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        logits_NE = nn.functional.linear(x_ND.to(dtype), self.weight.to(dtype))
        return logits_NE.sigmoid() if self.config.score_function == "sigmoid" else logits_NE.softmax(dim=-1)

    def choice(self, scores_NE: Tensor) -> Tensor:
        """What selects: scores with the correction bias, minus infinity outside of the best groups. No gradient."""
        return self._within_groups(scores_NE.detach() + self.e_score_correction_bias.to(scores_NE.dtype))

    def select(self, choice_NE: Tensor) -> Tensor:
        """The ids of the best experts of every token, ``[N, k]``."""
        return choice_NE.topk(self.config.num_experts_per_token, dim=-1, sorted=False).indices

    def _within_groups(self, choice_NE: Tensor) -> Tensor:
        """Rule out the experts of all but the best groups; a group counts by its two best experts."""
        config = self.config
        if config.num_groups == config.topk_group:
            return choice_NE
        choice_NGE = torch.unflatten(choice_NE, -1, (config.num_groups, -1))
        group_scores_NG = choice_NGE.topk(2, dim=-1).values.sum(dim=-1)
        kept_NG = group_scores_NG.topk(config.topk_group, dim=-1).indices
        excluded_NG = torch.ones_like(group_scores_NG, dtype=torch.bool).scatter(1, kept_NG, False)
        return torch.masked_fill(choice_NGE, excluded_NG[..., None], -torch.inf).flatten(1)
