"""How alike two runs predict the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from k3convert.parity import limits
from k3convert.parity.cells import Precision
from k3convert.parity.limits import Gate

SLICE_VALUES = 1 << 22
TOP = 5


@dataclass(frozen=True, slots=True)
class Divergence:
    """A run's predictions beside the golden ones, over all tokens.

    Attributes:
        mean_kl: mean of ``KL(golden || run)``, in nats.
        p99_kl: its 99th percentile.
        max_kl: its largest.
        mean_reverse_kl: mean of ``KL(run || golden)``.
        p99_reverse_kl: its 99th percentile.
        max_reverse_kl: its largest.
        top_1: share of tokens with the same most likely next token.
        top_5: mean share of the five most likely next tokens that are the same.
        nll_delta: mean difference of the token losses, run minus golden, over counted labels; None without labels.
    """

    mean_kl: float
    p99_kl: float
    max_kl: float
    mean_reverse_kl: float
    p99_reverse_kl: float
    max_reverse_kl: float
    top_1: float
    top_5: float
    nll_delta: float | None


@dataclass(frozen=True, slots=True)
class LogitAgreement:
    """Candidate and baseline, each beside the golden run."""

    num_tokens: int
    candidate: Divergence
    baseline: Divergence
    gates: tuple[Gate, ...]

    @property
    def is_outside(self) -> bool:
        """Whether any limit is exceeded."""
        return any(gate.is_beyond for gate in self.gates)


def compare_logits(
    candidate: Tensor,
    baseline: Tensor,
    golden: Tensor,
    precision: Precision,
    *,
    losses: tuple[Tensor, Tensor, Tensor] | None = None,
    device: str | torch.device = "cpu",
) -> LogitAgreement:
    """Compare logits ``[..., vocabulary]`` of three runs, some tokens at a time.

    Args:
        candidate: logits.
        baseline: logits.
        golden: logits.
        precision: of the cell.
        losses: token losses of the three runs in the same order, 0 where no label is counted.
        device: where slices are computed.
    """
    wanted = golden.reshape(-1, golden.shape[-1])
    num_tokens, vocabulary = wanted.shape
    step = max(1, SLICE_VALUES // vocabulary)
    of_run = []
    for number, logits in enumerate((candidate, baseline)):
        own = logits.reshape(-1, vocabulary)
        parts = [
            _slice_figures(own[start : start + step].to(device), wanted[start : start + step].to(device))
            for start in range(0, num_tokens, step)
        ]
        delta = None if losses is None else _nll_delta(losses[number], losses[2])
        of_run.append(_divergence(torch.cat(parts, dim=1), delta))
    # the baseline's own bits use nothing of any limit
    gates = () if torch.equal(candidate, baseline) else _gates(of_run[0], of_run[1], num_tokens, precision)
    return LogitAgreement(num_tokens, of_run[0], of_run[1], gates)


def _slice_figures(own: Tensor, golden: Tensor) -> Tensor:
    """``[4, tokens]`` float64: both divergences, whether the first choice is kept, the share of five kept."""
    log_p, log_q = (torch.log_softmax(logits.double(), dim=-1) for logits in (golden, own))
    ahead = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    reverse = (log_q.exp() * (log_q - log_p)).sum(dim=-1)
    top = min(TOP, own.shape[-1])
    best_p, best_q = (logits.double().topk(top, dim=-1).indices for logits in (golden, own))
    shared = (best_p[:, :, None] == best_q[:, None, :]).any(dim=-1).double().mean(dim=-1)
    return torch.stack((ahead, reverse, (best_p[:, 0] == best_q[:, 0]).double(), shared)).cpu()


def _divergence(figures: Tensor, nll_delta: float | None) -> Divergence:
    # what rounding leaves of a divergence of zero can be negative
    ahead, reverse = figures[0].clamp(min=0), figures[1].clamp(min=0)
    return Divergence(
        mean_kl=float(ahead.mean()),
        p99_kl=_percentile(ahead, 0.99),
        max_kl=float(ahead.max()),
        mean_reverse_kl=float(reverse.mean()),
        p99_reverse_kl=_percentile(reverse, 0.99),
        max_reverse_kl=float(reverse.max()),
        top_1=float(figures[2].mean()),
        top_5=float(figures[3].mean()),
        nll_delta=nll_delta,
    )


def _percentile(values: Tensor, share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return float(values.sort().values[max(0, math.ceil(share * len(values)) - 1)])


def _nll_delta(own: Tensor, golden: Tensor) -> float:
    num_counted = int((golden != 0).sum())
    return float((own.double() - golden.double()).sum()) / max(1, num_counted)


def _gates(candidate: Divergence, baseline: Divergence, num_tokens: int, precision: Precision) -> tuple[Gate, ...]:
    ratio = limits.KL_RATIO.value
    mean, p99 = limits.MEAN_KL[precision], limits.P99_KL[precision]
    missed = 1 - baseline.top_1
    spread = math.sqrt(max(missed, 1 / num_tokens) * (1 - min(missed, 0.5)) / num_tokens)
    return (
        Gate(mean.name, candidate.mean_kl, max(mean.value, ratio * baseline.mean_kl)),
        Gate(p99.name, candidate.p99_kl, max(p99.value, ratio * baseline.p99_kl)),
        Gate(
            limits.TOP_1.name,
            1 - candidate.top_1,
            max(limits.TOP_1.value, 2 * missed + limits.TOP_1_SIGMAS.value * spread),
        ),
    )
