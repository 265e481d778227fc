"""Quantile balancing: the correction bias under which every expert would have had its share of the tokens.

Expert ``j`` gets token ``i`` where its biased score is above the token's cutoff ``alpha_i``, the best biased score that
was not selected. With ``r_ij = alpha_i - s_ij`` that is where the bias is above ``r_ij``; so the ``k / n`` quantile of
``r_.j`` gives the expert ``k / n`` of the tokens. The quantile is read from a histogram, whose counts of ranks and
micro-batches add up.

Source: Kimi K3 report, section 2.3.3 and appendices C and D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 1000
# Scores lie in 0..1, so that no margin is further than this from a bias.
MARGIN = 1.0


@dataclass(frozen=True)
class Bins:
    """Where the bins of all experts begin, and how wide they are: 0-d float32."""

    start: Tensor
    width: Tensor

    @classmethod
    def around(cls, bias_E: Tensor) -> Bins:
        """Uniform bins that hold every margin under this bias."""
        start = bias_E.min() - MARGIN
        return cls(start, (bias_E.max() + MARGIN - start) / NUM_BINS)


def count_margins(scores_NE: Tensor, choice_NE: Tensor, num_selected: int, bins: Bins) -> Tensor:
    """Count the margins of tokens, an expert a row.

    Args:
        scores_NE: scores without bias.
        choice_NE: scores with it, as they select.
        num_selected: experts a token goes to.
        bins: of the bias that selected.

    Returns:
        int64 ``[E, NUM_BINS]``.
    """
    num_experts = scores_NE.shape[1]
    cutoff_N1 = choice_NE.topk(num_selected + 1, dim=-1).values[:, -1:]
    bin_NE = ((cutoff_N1 - scores_NE - bins.start) / bins.width).floor().long().clamp(0, NUM_BINS - 1)
    of_expert = torch.arange(num_experts, device=scores_NE.device) * NUM_BINS
    return torch.bincount((bin_NE + of_expert).flatten(), minlength=num_experts * NUM_BINS).view(num_experts, NUM_BINS)


def balanced_bias(counts_EB: Tensor, num_selected: int, bins: Bins) -> Tensor:
    """The bias of the next step: every expert's quantile, then their mean taken off. float32 ``[E]``.

    Inside a bin the margins are taken as spread evenly.

    Raises:
        ValueError: nothing was counted.
    """
    num_experts = len(counts_EB)
    num_tokens = int(counts_EB[0].sum())
    if not num_tokens:
        raise ValueError("no token was counted: there is no quantile")
    wanted = num_tokens * num_selected / num_experts
    cumulative_EB = counts_EB.cumsum(1)
    is_reached_EB = cumulative_EB >= -(-num_tokens * num_selected // num_experts)
    bin_E = is_reached_EB.int().argmax(1)
    inside_E = counts_EB.gather(1, bin_E[:, None])[:, 0]
    before_E = cumulative_EB.gather(1, bin_E[:, None])[:, 0] - inside_E
    within_E = ((wanted - before_E) / inside_E).clamp(0, 1)
    bias_E = bins.start + (bin_E + within_E) * bins.width
    return (bias_E - bias_E.mean()).float()
