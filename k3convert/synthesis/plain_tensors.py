"""Values of the tensors that are not packed: distributions that make wrong arithmetic visible.

Norm gains are not 1, the router's bias reorders the experts, the decay's parameters spread over their range, and the
first query projection is small enough for an epsilon of 1e-6 or 1e-5 in its norm to matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3convert.numerics.casts import float32_to_bf16
from k3convert.numerics.mxfp4_format import F32, U16
from k3convert.synthesis.random_stream import random_stream
from k3model.census import TensorSpec
from k3model.config import KimiK3Config

PIECE_VALUES = 1 << 20
NUM_QUANTILES = 1 << 16


@dataclass(frozen=True, slots=True)
class Normal:
    """N(0, std), cut at four standard deviations."""

    std: float

    def quantiles(self) -> F32:
        """float32 ``[65536]``."""
        return _standard_normal_quantiles() * np.float32(self.std)


@dataclass(frozen=True, slots=True)
class Uniform:
    """U(low, high)."""

    low: float
    high: float

    def quantiles(self) -> F32:
        """float32 ``[65536]``."""
        return (self.low + (self.high - self.low) * _probabilities()).astype(np.float32)


@dataclass(frozen=True, slots=True)
class LogUniform:
    """The logarithm of U(low, high)."""

    low: float
    high: float

    def quantiles(self) -> F32:
        """float32 ``[65536]``."""
        return np.log(self.low + (self.high - self.low) * _probabilities()).astype(np.float32)


Distribution = Normal | Uniform | LogUniform

# The first suffix that fits decides.
DISTRIBUTIONS: tuple[tuple[str, Distribution], ...] = (
    ("A_log", LogUniform(1, 16)),
    ("dt_bias", Normal(0.5)),
    ("_conv1d.weight", Normal(0.25)),
    ("e_score_correction_bias", Normal(0.05)),
    ("q_a_proj.weight", Normal(0.005)),
    ("norm.weight", Uniform(0.8, 1.2)),
    ("norm0.weight", Uniform(0.8, 1.2)),
    ("norm1.weight", Uniform(0.8, 1.2)),
    ("", Normal(0.02)),
)


def plain_pieces(spec: TensorSpec, config: KimiK3Config, seed: int) -> Iterator[NDArray[Any]]:
    """The stored values of one plain tensor, piece by piece: float32, or uint16 for bf16.

    ``A_log`` beyond the heads and the embedding of the padding token are zeros.

    Raises:
        ValueError: the tensor is neither F32 nor BF16.
    """
    if spec.dtype not in ("F32", "BF16"):
        raise ValueError(f"{spec.name} is {spec.dtype}; only F32 and BF16 tensors are plain")
    random = random_stream(seed, spec.name)
    table = _table(_distribution(spec), spec.dtype)
    count = math.prod(spec.shapes[0])
    zeros = _zeros(spec, config)
    for first in range(0, count, PIECE_VALUES):
        last = min(first + PIECE_VALUES, count)
        values = table[random.integers(0, NUM_QUANTILES, last - first, dtype=np.uint16)]
        values[max(zeros.start - first, 0) : max(zeros.stop - first, 0)] = 0
        yield values


@cache
def _table(distribution: Distribution, dtype: str) -> F32 | U16:
    """Equally likely values as they are stored. A look-up is ten times as fast as drawing from the distribution."""
    quantiles = distribution.quantiles()
    if dtype == "F32":
        return quantiles
    bits = np.empty(quantiles.shape, dtype=np.uint16)
    float32_to_bf16(quantiles, bits)
    return bits


def _probabilities() -> NDArray[np.float64]:
    return (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES


@cache
def _standard_normal_quantiles() -> F32:
    quantile = NormalDist().inv_cdf
    return np.array([quantile(probability) for probability in _probabilities().tolist()], dtype=np.float32)


def _distribution(spec: TensorSpec) -> Distribution:
    if spec.name.endswith("_res_proj.weight"):
        return Normal(spec.shapes[0][-1] ** -0.5)
    return next(distribution for suffix, distribution in DISTRIBUTIONS if spec.name.endswith(suffix))


def _zeros(spec: TensorSpec, config: KimiK3Config) -> range:
    """Flat positions that are zero by definition."""
    if spec.name.endswith("A_log") and config.text.kda is not None:
        return range(config.text.kda.num_heads, spec.shapes[0][0])
    if spec.component == "embed" and config.text.pad_token_id is not None:
        width = spec.shapes[0][1]
        return range(config.text.pad_token_id * width, (config.text.pad_token_id + 1) * width)
    return range(0)
