"""The limits of a comparison. Each says where it comes from, and every report prints those it used."""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3convert.parity.cells import Precision
from k3convert.parity.records import Kind

DUAL_BENCHMARK = (
    "Ascend's operator acceptance: errors of candidate and baseline against a high-precision result may stand as "
    "2 to 1 in root mean square and as 10 to 1 in the maximum"
)
FLA_TESTS = "error ratios of flash-linear-attention's own tests"


@dataclass(frozen=True, slots=True)
class Limit:
    """A threshold: what it is called, the value, and why this value."""

    name: str
    value: float
    origin: str


@dataclass(frozen=True, slots=True)
class Gate:
    """One limit applied.

    Attributes:
        limit: name of the limit.
        measured: the figure.
        allowed: its largest permitted value.
    """

    limit: str
    measured: float
    allowed: float

    @property
    def headroom(self) -> float:
        """Measured over allowed: 1 is the limit, and NaN counts as beyond it."""
        if math.isnan(self.measured):
            return math.inf
        if self.measured <= 0:
            return 0.0
        return self.measured / self.allowed if self.allowed > 0 else math.inf

    @property
    def is_beyond(self) -> bool:
        """Whether the figure is too large."""
        return not self.measured <= self.allowed


RMS_RATIO = Limit("rms_ratio", 2.0, DUAL_BENCHMARK)
MAX_RATIO = Limit("max_ratio", 10.0, DUAL_BENCHMARK)
POOLED_VALUES = Limit(
    "pooled_values", 256, "of two equally good candidates one has twice the other's error in 0.01 % of cases at 32 "
    "independent values; 256 leave room for values that are not independent",
)  # fmt: skip
ALONE = Limit(
    "alone", 2.0, "a pool hides one bad layer among many, so a tensor of 256 values is judged alone as well; at twice "
    "the pool's limits, because errors of one tensor's values depend on each other more than those of a pool",
)  # fmt: skip
SMALL_RATIO = Limit(
    "small_ratio", 10.0, "fewer values than a pool needs say little about a ratio: the ceiling holds, or ten times the "
    "baseline's error where the depth of the network makes that larger than the ceiling of a single op",
)  # fmt: skip
# Below a quarter of the rms a mean error is common to equally good runs: rounding has favourite directions.
BIAS_VALUES = 256
BIAS = Limit(
    "bias", 4.0, "a mean error of four standard errors happens by chance once in 16,000 pools; errors of a row or a "
    "column count as one cause, n as 256 at most, and twice the baseline's bias is allowed as it is for the rms",
)  # fmt: skip
NON_FINITE = Limit("non_finite", 0.0, "NaN and infinities are where the baseline has them, and nowhere else")
BITWISE = Limit("bitwise", 0.0, "the cell's expectation says that these bits are equal")
FLIP_MARGIN = Limit(
    "flip_margin", 6.0, "two scores can change places up to a margin of the errors of both, in the candidate (at most "
    "twice the baseline's) and in the baseline: 2 * (2 + 1) of the baseline's largest error in that layer",
)  # fmt: skip
KL_RATIO = Limit("kl_ratio", 4.0, "divergence grows with the square of the error, and the error may be twice as large")
TOP_1_SIGMAS = Limit("top_1_sigmas", 4.0, "twice the baseline's disagreement, and four standard deviations of a count")

_BF16_DECAY = ("A_log", "dt_bias", "f_a_proj", "f_b_proj", "b_proj", "decay", "gate")
_GRADIENTS = frozenset(
    {Kind.INPUT_GRADIENT, Kind.OUTPUT_GRADIENT, Kind.PARAMETER_GRADIENT, Kind.GRADIENT_NORM}
)  # fmt: skip

FP64 = Limit("ceiling.fp64", 1e-12, "some thousand roundings of 2^-53")
FP32 = Limit("ceiling.fp32", 1e-5, "some hundred roundings of 2^-24, as a single op has them")
FP32_LOGITS = Limit("ceiling.fp32.logits", 1e-4, "ten ops' worth of the ceiling of one")
FP32_NORM = Limit("ceiling.fp32.gradient_norm", 1e-3, "parallel sums of squares in any order, with wide room")
BF16 = Limit("ceiling.bf16", 5e-3, FLA_TESTS)
BF16_GRADIENT = Limit("ceiling.bf16.gradient", 8e-3, FLA_TESTS)
BF16_DECAY = Limit("ceiling.bf16.decay_gradient", 2e-2, FLA_TESTS)
BF16_LOGITS = Limit("ceiling.bf16.logits", 2e-2, "a few roundings of 2^-8 through the depth of a network")
BF16_NORM = Limit("ceiling.bf16.gradient_norm", 2e-2, "below the 5 % that AutoModel's parallel comparison allows")

MEAN_KL = {
    Precision.FP64: Limit("ceiling.fp64.mean_kl", 1e-14, "what float64 leaves of a sum over a vocabulary"),
    Precision.FP32: Limit("ceiling.fp32.mean_kl", 1e-8, "half the square of the logits' ceiling"),
    Precision.BF16: Limit("ceiling.bf16.mean_kl", 1e-3, "the scale of published K3 comparisons in bf16"),
}
P99_KL = {
    Precision.FP64: Limit("ceiling.fp64.p99_kl", 1e-13, "ten times the mean's"),
    Precision.FP32: Limit("ceiling.fp32.p99_kl", 1e-7, "ten times the mean's"),
    Precision.BF16: Limit("ceiling.bf16.p99_kl", 1e-2, "ten times the mean's"),
}
TOP_1 = Limit("top_1", 0.01, "99 % of tokens keep their first choice")

LIMITS = (
    RMS_RATIO, MAX_RATIO, POOLED_VALUES, ALONE, SMALL_RATIO, BIAS, NON_FINITE, BITWISE, FLIP_MARGIN, KL_RATIO,
    TOP_1_SIGMAS, TOP_1, FP64, FP32, FP32_LOGITS, FP32_NORM, BF16, BF16_GRADIENT, BF16_DECAY, BF16_LOGITS, BF16_NORM,
    *MEAN_KL.values(), *P99_KL.values(),
)  # fmt: skip


def ceiling(kind: Kind, name: str, precision: Precision) -> Limit:
    """The relative root mean square error that a tensor may have whatever its baseline's is.

    Args:
        kind: of the tensor.
        name: of its module or parameter.
        precision: of the cell; what stays float32 in a bf16 network still gets its inputs in bf16.
    """
    if precision is Precision.FP64:
        return FP64
    is_fp32 = precision is Precision.FP32
    if kind is Kind.GRADIENT_NORM:
        return FP32_NORM if is_fp32 else BF16_NORM
    if kind is Kind.LOGITS:
        return FP32_LOGITS if is_fp32 else BF16_LOGITS
    if is_fp32:
        return FP32
    if kind not in _GRADIENTS:
        return BF16
    return BF16_DECAY if any(part in _BF16_DECAY for part in name.split(".")) else BF16_GRADIENT
