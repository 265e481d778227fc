"""Why errors are pooled: how often an equally good candidate fails, and whether a bad one ever passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from k3convert.parity import limits
from k3convert.parity.cells import Precision
from k3convert.parity.limits import Gate
from k3convert.parity.measure import measure
from k3convert.parity.pooling import Measured, Totals, gates_of, pool_key, sum_up
from k3convert.parity.records import Entry, Kind

TRIALS = 400_000
GOOD = Totals(
    num_values=10_000, candidate_rms=1e-3, baseline_rms=1e-3, candidate_max=4e-3, baseline_max=4e-3,
    candidate_bias=1.0, baseline_bias=1.0, num_non_finite=0, has_ratio=True,
)  # fmt: skip
CEILING = limits.ceiling(Kind.OUTPUT, "x", Precision.BF16)


def ratios(num_values: int, trials: int = TRIALS, candidate: float = 1.0, seed: int = 0) -> np.ndarray:
    """Ratios of the rms errors of two runs, each the sum of as many squares of independent normal errors."""
    generator = np.random.default_rng(seed)
    own, base = generator.chisquare(num_values, (2, trials))
    return candidate * np.sqrt(own / base)


@pytest.mark.parametrize(
    ("num_values", "share"),
    # The share of pairs of equally good runs of which one has more than twice the other's error: tan(theta) > 2 of a
    # random direction for one value, and the tail of an F distribution in general.
    [(1, 0.295), (6, 0.058), (16, 0.0042), (32, 0.0001)],
)
def test_few_values_often_fail_an_equally_good_candidate(num_values: int, share: float) -> None:
    found = float((ratios(num_values) > limits.RMS_RATIO.value).mean())

    assert found == pytest.approx(share, rel=0.2, abs=4 * np.sqrt(share / TRIALS))  # the digits given, and chance


def test_a_pool_of_the_smallest_size_never_fails_an_equally_good_candidate() -> None:
    found = ratios(int(limits.POOLED_VALUES.value))

    assert not (found > limits.RMS_RATIO.value).any()
    assert found.max() < 1.5


def test_errors_that_share_causes_leave_a_pool_room() -> None:
    """Eight values a cause make 32 independent ones of 256: one equally good candidate in 10,000 fails."""
    found = float((ratios(int(limits.POOLED_VALUES.value) // 8) > limits.RMS_RATIO.value).mean())

    assert found < 2e-4


@pytest.mark.parametrize("num_values", [256, 4096])
def test_a_candidate_three_times_as_bad_always_fails_a_pool(num_values: int) -> None:
    assert (ratios(num_values, candidate=3.0) > limits.RMS_RATIO.value).all()


def test_the_maximum_of_equally_good_rounding_errors_stays_far_below_its_limit() -> None:
    generator = np.random.default_rng(1)
    own, base = np.abs(generator.standard_normal((2, 20_000, 256))).max(axis=-1)

    assert (own / base).max() < 0.3 * limits.MAX_RATIO.value


def measured(candidate: Tensor, baseline: Tensor, golden: Tensor) -> Measured:
    dtype = str(baseline.dtype).removeprefix("torch.")
    entry = Entry(Kind.OUTPUT, "x", 0, "", None, "", dtype, tuple(golden.shape))
    return Measured(entry, pool_key(entry, {}), measure(candidate, baseline, golden), has_ratio=True)


def shared_errors(generator: np.random.Generator, rows: int, columns: int) -> Tensor:
    """Errors of which a third is common to a row, and a third to a column."""
    parts = (generator.standard_normal(shape) for shape in ((rows, 1), (1, columns), (rows, columns)))
    return torch.from_numpy(sum(parts, np.zeros((rows, columns)))) / 3**0.5


@pytest.mark.parametrize("shape", [(48, 64), (384, 16)])
def test_errors_of_rows_and_columns_that_share_causes_are_no_bias(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(2)
    golden = torch.from_numpy(generator.standard_normal(shape))
    naive, found = 0, 0
    for _ in range(300):
        candidate, baseline = (golden + 1e-3 * shared_errors(generator, *shape) for _ in range(2))
        totals = sum_up([measured(candidate, baseline, golden)])
        found += "bias" in beyond(totals)
        errors = candidate - golden
        naive += float(errors.mean().abs() / errors.square().mean().sqrt()) * errors.numel() ** 0.5 > limits.BIAS.value

    assert found == 0
    assert naive > 30


def test_the_standard_error_is_that_of_the_mean_of_shared_errors() -> None:
    generator = np.random.default_rng(3)
    zeros = torch.zeros(48, 64, dtype=torch.float64)
    found = [measure(shared_errors(generator, 48, 64), zeros, zeros).candidate for _ in range(400)]

    means = torch.tensor([each.mean for each in found], dtype=torch.float64)
    spreads = torch.tensor([each.mean_spread for each in found], dtype=torch.float64)
    # the deviation of 400 means is known to 4 %, three times over
    assert float(spreads.square().mean().sqrt()) == pytest.approx(float(means.std()), rel=0.12)


@pytest.mark.parametrize("shape", [(64, 64), (4096,), (16, 16)])
def test_rounding_towards_zero_is_a_bias(shape: tuple[int, ...]) -> None:
    golden = torch.from_numpy(np.random.default_rng(4).standard_normal(shape))
    truncated = (golden.float().view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()

    assert "bias" in beyond(sum_up([measured(truncated, golden.bfloat16(), golden)]))
    assert "bias" not in beyond(sum_up([measured(golden.bfloat16(), truncated, golden)]))


def test_slices_do_not_change_a_standard_error() -> None:
    golden = torch.from_numpy(np.random.default_rng(5).standard_normal((40, 30)))
    candidate = golden + 1e-3 * shared_errors(np.random.default_rng(6), 40, 30)

    whole, sliced = (measure(candidate, golden, golden, slice_values=size).candidate for size in (10_000, 100))
    assert whole.mean_spread == pytest.approx(sliced.mean_spread, rel=1e-9)  # order of float64 sums
    assert whole.outward_spread == pytest.approx(sliced.outward_spread, rel=1e-9)


def beyond(totals: Totals) -> set[str]:
    return {gate.limit for gate in gates_of(totals, CEILING) if gate.is_beyond}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, set()),
        ({"candidate_rms": 2.1e-3}, {"rms_ratio"}),
        ({"candidate_rms": 1.9e-3}, set()),
        ({"candidate_max": 4.1e-2}, {"max_ratio"}),
        ({"candidate_bias": 4.1}, {"bias"}),
        ({"candidate_bias": 9.0, "baseline_bias": 4.6}, set()),
        ({"candidate_bias": 9.3, "baseline_bias": 4.6}, {"bias"}),
        ({"candidate_bias": 9.0, "candidate_rms": 4e-4}, set()),
        ({"num_non_finite": 1}, {"non_finite"}),
        ({"candidate_rms": float("nan")}, {"rms_ratio"}),
        ({"num_values": 255, "candidate_rms": 4.9e-3, "candidate_max": 1.0}, set()),
        ({"num_values": 255, "candidate_rms": 1.1e-2}, {"small_ratio"}),
        ({"num_values": 255, "candidate_rms": 5.1e-3, "baseline_rms": 1e-4}, {"ceiling.bf16"}),
        ({"has_ratio": False, "candidate_rms": 5.1e-3}, {"ceiling.bf16"}),
        ({"has_ratio": False, "candidate_rms": 4.9e-3, "candidate_max": 1.0}, set()),
    ],
)
def test_each_limit_fails_alone(changes: dict[str, float], names: set[str]) -> None:
    assert beyond(replace(GOOD, **changes)) == names  # type: ignore[arg-type]


def test_headroom_is_measured_over_allowed() -> None:
    assert Gate("x", 1.0, 4.0).headroom == 0.25
    assert Gate("x", 0.0, 0.0).headroom == 0.0
    assert Gate("x", 1.0, 0.0).headroom == float("inf")
    assert Gate("x", float("nan"), 1.0).headroom == float("inf")
    assert Gate("x", float("nan"), 1.0).is_beyond


@pytest.mark.parametrize(
    ("kind", "name", "precision", "value"),
    [
        (Kind.OUTPUT, "a.q_proj", Precision.FP64, 1e-12),
        (Kind.OUTPUT, "a.q_proj", Precision.FP32, 1e-5),
        (Kind.LOGITS, "logits", Precision.FP32, 1e-4),
        (Kind.GRADIENT_NORM, "gradient_norm", Precision.FP32, 1e-3),
        (Kind.OUTPUT, "a.q_proj", Precision.BF16, 5e-3),
        (Kind.PARAMETER_GRADIENT, "a.q_proj.weight", Precision.BF16, 8e-3),
        (Kind.PARAMETER_GRADIENT, "a.decay.A_log", Precision.BF16, 2e-2),
        (Kind.PARAMETER_GRADIENT, "a.b_proj.weight", Precision.BF16, 2e-2),
        (Kind.LOGITS, "logits", Precision.BF16, 2e-2),
        (Kind.GRADIENT_NORM, "gradient_norm", Precision.BF16, 2e-2),
    ],
)
def test_ceilings_by_kind_and_dtype(kind: Kind, name: str, precision: Precision, value: float) -> None:
    assert limits.ceiling(kind, name, precision).value == value


def test_every_limit_has_a_name_of_its_own_and_an_origin() -> None:
    names = [limit.name for limit in limits.LIMITS]

    assert len(set(names)) == len(names)
    assert all(len(limit.origin) > 10 for limit in limits.LIMITS)
