"""Distances between tensors: bits, units in the last place, values."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from k3convert.numerics import difference as array_difference
from k3convert.numerics import digest
from k3convert.parity.measure import ULP_CLASSES, ULP_EDGES, half_ulp, measure, tensor_digest

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def class_of(distance: int) -> str:
    return next((str(edge) for edge in ULP_EDGES if distance <= edge), ULP_CLASSES[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_bitwise_equal_to_itself(dtype: torch.dtype) -> None:
    value = normal(7, 33).to(dtype)

    found = measure(value.clone(), value, normal(7, 33))
    assert found.is_bitwise
    assert found.difference.num_different == 0
    assert found.difference.first is None
    assert found.difference.ulp_counts == (value.numel(), *(0,) * (len(ULP_CLASSES) - 1))
    assert found.candidate == found.baseline


def test_every_bf16_value_is_as_far_from_another_as_their_places_among_all_values_say() -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    ordered = patterns[patterns.isfinite()].float().unique(sorted=True).bfloat16()  # -0 and 0 are one value
    zero = int((ordered == 0).nonzero())
    for step in (1, 2, 3, 1024, 1025):
        low, high = ordered[:-step], ordered[step:]
        places = torch.arange(len(low))
        flips = int(((places < zero) & (places + step > zero)).sum())

        found = measure(high, low, low.double()).difference
        counts = dict(zip(ULP_CLASSES, found.ulp_counts, strict=True))
        assert counts.pop(class_of(step)) == len(low) - flips
        assert not any(counts.values())
        assert found.num_sign_flips == flips
        assert found.max_ulp == step


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_are_one_unit_apart_in_every_dtype(dtype: torch.dtype) -> None:
    value = normal(1000).to(dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    neighbour = (value.view(integers) + 1).view(dtype)

    found = measure(neighbour, value, value.double()).difference
    assert found.ulp_counts[1] == found.num_different == 1000
    assert found.max_ulp == 1


def test_the_largest_values_of_opposite_sign_do_not_overflow() -> None:
    big = torch.tensor([torch.finfo(torch.float64).max, -torch.finfo(torch.float64).max], dtype=torch.float64)

    found = measure(torch.tensor([big[1], 0.0], dtype=torch.float64), big, torch.zeros(2, dtype=torch.float64))
    assert found.difference.num_sign_flips == 1
    assert found.difference.ulp_counts[-1] == 1


def test_both_zeros_are_the_same_value_with_other_bits() -> None:
    found = measure(torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.0]), torch.zeros(2))

    assert not found.is_bitwise
    assert found.difference.num_different == 1
    assert found.difference.ulp_counts[0] == 2
    assert found.difference.num_sign_flips == 0
    assert found.difference.at is None


def test_nan_and_infinities_that_do_not_match_are_counted_apart() -> None:
    inf, nan = math.inf, math.nan
    candidate = torch.tensor([nan, inf, -inf, 1.0, nan, inf, -inf, 2.0])
    baseline = torch.tensor([nan, inf, -inf, 1.0, 1.0, 1.0, inf, nan])

    found = measure(candidate, baseline, torch.ones(8))
    assert found.difference.num_non_finite == 4
    assert found.difference.num_different == 4
    assert sum(found.difference.ulp_counts) == 1
    assert found.num_judged == 1
    assert found.candidate.rms == found.candidate.max_abs == 0


def test_a_golden_value_that_is_not_finite_is_not_judged() -> None:
    found = measure(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([1.0, math.inf]))

    assert found.num_judged == 1
    assert found.candidate.max_abs == found.baseline.max_abs == 0
    assert found.difference.max_abs == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_and_distances_agree_with_the_comparison_of_checkpoints(dtype: torch.dtype) -> None:
    baseline = normal(5000).to(dtype)
    bits = baseline.view({2: torch.int16, 4: torch.int32}[baseline.element_size()]).clone()
    bits[100::7] += torch.arange(len(bits[100::7])).to(bits.dtype) % 90  # no element changes its sign
    candidate = bits.view(dtype)

    found = measure(candidate, baseline, baseline.double(), slice_values=256).difference
    as_numpy = [t.view(torch.uint16).numpy() if dtype is torch.bfloat16 else t.numpy() for t in (candidate, baseline)]
    want = array_difference.compare(*as_numpy)
    assert found.num_sign_flips == 0
    assert (found.num_different, found.first, found.max_ulp) == (
        want.num_different, want.first_different, want.max_ulp,
    )  # fmt: skip
    assert found.max_abs == pytest.approx(want.max_abs, rel=1e-6)  # the other one subtracts in float32


def test_errors_are_those_of_float64_arithmetic() -> None:
    golden = normal(40, 50)
    candidate, baseline = (golden + 1e-3 * normal(40, 50, seed=1)).float(), golden.float()

    found = measure(candidate, baseline, golden, slice_values=333)
    g, c = golden.numpy().ravel(), candidate.double().numpy().ravel()
    error = c - g
    scale = np.maximum(np.abs(g), np.sqrt(np.mean(g**2)))
    want = {
        "rms": np.sqrt(np.mean(error**2)),
        "max_abs": np.abs(error).max(),
        "max_rel": (np.abs(error) / scale).max(),
        "mean": error.mean(),
        "mean_outward": (error * np.sign(g)).mean(),
        "cosine": c @ g / np.linalg.norm(c) / np.linalg.norm(g),
        "norm_ratio": np.linalg.norm(c) / np.linalg.norm(g),
    }
    for name, value in want.items():
        # sums over other pieces round elsewhere
        assert getattr(found.candidate, name) == pytest.approx(value, rel=1e-9, abs=1e-18), name
    assert found.golden_rms == pytest.approx(np.sqrt(np.mean(g**2)))
    at = int(np.abs(c - baseline.double().numpy().ravel()).argmax())
    assert found.difference.at == at
    assert found.difference.candidate_value == c[at]
    assert found.difference.baseline_value == float(baseline.view(-1)[at])


def test_slices_change_nothing_but_the_rounding_of_sums() -> None:
    golden = normal(3001)
    candidate, baseline = golden.bfloat16(), (golden * 1.001).bfloat16()
    candidate[:1500] = baseline[:1500]  # what differs begins in a later slice

    whole, sliced = measure(candidate, baseline, golden), measure(candidate, baseline, golden, slice_values=100)
    assert whole.difference == sliced.difference
    assert whole.candidate_digest == sliced.candidate_digest
    assert whole.num_judged == sliced.num_judged
    assert whole.candidate.rms == pytest.approx(sliced.candidate.rms, rel=1e-12)  # order of a float64 sum


def test_rounding_towards_zero_shows_in_the_outward_mean_and_in_no_other_mean() -> None:
    golden = normal(20000)
    truncated = (golden.float().view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()

    found = measure(truncated, golden.bfloat16(), golden)
    assert found.candidate.mean_outward < -0.6 * found.candidate.rms
    assert abs(found.candidate.mean) < 0.05 * found.candidate.rms
    assert abs(found.baseline.mean_outward) < 0.05 * found.baseline.rms


def test_zero_tensors_are_equal_and_a_value_where_none_should_be_is_infinitely_large() -> None:
    zeros = torch.zeros(4)

    same = measure(zeros, zeros, zeros).candidate
    other = measure(torch.tensor([0.0, 0.0, 0.0, 1.0]), zeros, zeros).candidate
    assert (same.cosine, same.norm_ratio) == (1.0, 1.0)
    assert (other.cosine, other.norm_ratio) == (0.0, math.inf)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
def test_scalars_and_empty_tensors_are_measured(shape: tuple[int, ...]) -> None:
    value = torch.ones(shape)

    found = measure(value, value, value.double())
    assert found.num_values == value.numel()
    assert found.is_bitwise


def test_a_digest_is_of_the_global_tensor_and_not_of_its_layout() -> None:
    value = torch.arange(12, dtype=torch.float32).view(3, 4)

    want = digest.digest_hex(value.numpy().astype("<f4").tobytes())
    assert tensor_digest(value) == want
    assert tensor_digest(value.T.contiguous().T) == want
    assert tensor_digest(value.T) != want


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        measure(torch.ones(2), torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match="dtypes"):
        measure(torch.ones(2), torch.ones(2).bfloat16(), torch.ones(2))
    with pytest.raises(ValueError, match="dtypes"):
        measure(torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), torch.ones(2))


def test_half_a_unit_is_the_largest_relative_error_of_one_rounding() -> None:
    assert half_ulp(torch.bfloat16) == 2**-8
    assert half_ulp(torch.float32) == 2**-24
    value = 1 + torch.rand(10000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = ((value.bfloat16().double() - value) / value).abs().max()
    assert 0.95 * half_ulp(torch.bfloat16) < error <= half_ulp(torch.bfloat16)


def test_measuring_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(torch.ones(3)[::2], torch.ones(2), torch.ones(2))
