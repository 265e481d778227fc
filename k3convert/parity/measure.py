"""How far a tensor is from the same tensor of another run, in bits, in units in the last place and in value.

Everything is summed over slices, so that a tensor of billions of elements needs no copy of its own size in float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from k3convert.numerics import digest
from k3convert.parity.tensor_errors import Errors, ErrorSums, sums_of

# In float64 a slice fits a core's cache on a CPU, and fills a device.
CPU_SLICE_VALUES = 1 << 15
DEVICE_SLICE_VALUES = 1 << 22
# Upper ends of the classes of distances; the last class has none.
ULP_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ULP_CLASSES = (*(str(edge) for edge in ULP_EDGES), f">{ULP_EDGES[-1]}")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """The candidate beside the baseline.

    Attributes:
        num_different: elements with other bits; -0 and +0 differ.
        first: flat index of the first of them.
        at: flat index of the largest absolute difference; None where all finite values are equal.
        candidate_value: the candidate there.
        baseline_value: the baseline there.
        max_abs: the largest absolute difference of finite values.
        ulp_counts: elements by distance in units in the last place, one count for each of ``ULP_CLASSES``: both zeros
            are one value, each class holds the distances above the class before it. Sign flips, NaN and infinities are
            in none of them.
        max_ulp: the largest distance in ``ulp_counts``.
        num_sign_flips: elements of opposite sign, neither of them zero.
        num_non_finite: elements of which one is NaN or an infinity and the other is not the same.
    """

    num_different: int = 0
    first: int | None = None
    at: int | None = None
    candidate_value: float = 0.0
    baseline_value: float = 0.0
    max_abs: float = 0.0
    ulp_counts: tuple[int, ...] = (0,) * len(ULP_CLASSES)
    max_ulp: int = 0
    num_sign_flips: int = 0
    num_non_finite: int = 0


@dataclass(frozen=True, slots=True)
class Measure:
    """A tensor of three runs.

    Attributes:
        num_values: elements.
        num_judged: elements that are finite in all three.
        golden_rms: root mean square of the golden ones of these.
        candidate: its errors against the golden run.
        baseline: its errors against the golden run.
        difference: candidate beside baseline.
        candidate_digest: of the candidate's bytes.
        baseline_digest: of the baseline's bytes.
    """

    num_values: int
    num_judged: int
    golden_rms: float
    candidate: Errors
    baseline: Errors
    difference: Difference
    candidate_digest: str
    baseline_digest: str

    @property
    def is_bitwise(self) -> bool:
        """Whether candidate and baseline have the same bytes."""
        return self.candidate_digest == self.baseline_digest


def measure(
    candidate: Tensor,
    baseline: Tensor,
    golden: Tensor,
    *,
    device: str | torch.device = "cpu",
    slice_values: int | None = None,
    candidate_digest: str | None = None,
    baseline_digest: str | None = None,
) -> Measure:
    """Measure one tensor of three runs.

    Args:
        candidate: any floating dtype and shape.
        baseline: of the candidate's dtype and shape.
        golden: of the same shape, in a dtype that is as wide or wider.
        device: where slices are computed; it needs float64.
        slice_values: elements at a time; None: as many as suit the device.
        candidate_digest: of the whole candidate, where this is a sample of it; None: of what is here.
        baseline_digest: likewise.

    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    if candidate.shape != baseline.shape or candidate.shape != golden.shape:
        raise ValueError(f"shapes differ: {tuple(candidate.shape)}, {tuple(baseline.shape)}, {tuple(golden.shape)}")
    if candidate.dtype != baseline.dtype or not (candidate.is_floating_point() and golden.is_floating_point()):
        raise ValueError(f"dtypes do not belong together: {candidate.dtype}, {baseline.dtype}, {golden.dtype}")
    candidate_digest = candidate_digest or tensor_digest(candidate)
    baseline_digest = baseline_digest or tensor_digest(baseline)
    flat = tuple(tensor.reshape(-1) for tensor in (candidate, baseline, golden))
    wanted = slice_values or (CPU_SLICE_VALUES if torch.device(device).type == "cpu" else DEVICE_SLICE_VALUES)
    columns = candidate.shape[-1] if candidate.dim() > 1 else 1
    size = max(1, wanted // max(1, columns)) * max(1, columns)  # whole rows
    scale = _finite_rms(flat[2], device, size)
    of_candidate, of_baseline, found = ErrorSums(columns), ErrorSums(columns), Difference()
    for start in range(0, flat[0].numel(), size):
        c, b, g = (tensor[start : start + size].to(device) for tensor in flat)
        g_64, b_64 = g.double(), b.double()
        if torch.equal(_bits(c), _bits(b)):
            found = _joined(found, _no_difference(b), start)
            part = sums_of((b_64,), g_64, scale, columns)[0]
            of_candidate.add(part)
            of_baseline.add(part)
        else:
            c_64 = c.double()
            found = _joined(found, _difference(c, b, c_64, b_64), start)
            part_c, part_b = sums_of((c_64, b_64), g_64, scale, columns)
            of_candidate.add(part_c)
            of_baseline.add(part_b)
    return Measure(
        num_values=flat[0].numel(),
        num_judged=of_candidate.num,
        golden_rms=math.sqrt(of_candidate.golden_squares / max(1, of_candidate.num)),
        candidate=of_candidate.errors(),
        baseline=of_baseline.errors(),
        difference=found,
        candidate_digest=candidate_digest,
        baseline_digest=baseline_digest,
    )


def tensor_digest(tensor: Tensor) -> str:
    """The digest of a tensor's elements in row-major order, little-endian, whatever its layout and device."""
    running = digest.new()
    for piece in _slices(tensor.detach().reshape(-1), DEVICE_SLICE_VALUES):
        raw = piece.cpu().contiguous().view(torch.uint8).numpy()
        if sys.byteorder == "big":
            raw = raw.reshape(-1, tensor.element_size())[:, ::-1].copy()
        running.update(raw.data)
    return running.hexdigest()


def half_ulp(dtype: torch.dtype) -> float:
    """Half a unit in the last place of 1: the relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def _no_difference(b: Tensor) -> Difference:
    num_finite = b.numel() if math.isfinite(float(b.sum(dtype=torch.float64))) else int(b.isfinite().count_nonzero())
    return Difference(ulp_counts=(num_finite, *(0,) * (len(ULP_CLASSES) - 1)))


def _difference(c: Tensor, b: Tensor, c_64: Tensor, b_64: Tensor) -> Difference:
    """Compare two slices that differ; the last two arguments are their values in float64."""
    # distances of one sign fit the dtype's own width, and 16 bits are widened so that they have one
    bits_c, bits_b = (_bits(value).to(torch.promote_types(_bits(value).dtype, torch.int32)) for value in (c, b))
    different = bits_c != bits_b
    largest = torch.iinfo(_INTEGERS[c.element_size()]).max
    size_c, size_b = bits_c & largest, bits_b & largest
    flips = ((bits_c ^ bits_b) < 0) & (size_c != 0) & (size_b != 0)
    distance = (size_c - size_b).abs_()
    away = (c_64 - b_64).abs_()
    num_non_finite = 0
    left_out = flips
    if not math.isfinite(float(away.sum())):
        both_finite = c_64.isfinite() & b_64.isfinite()
        num_non_finite = int((~(both_finite | (c == b) | (c.isnan() & b.isnan()))).count_nonzero())
        away.masked_fill_(~both_finite, 0.0)
        flips = flips & both_finite
        left_out = flips | ~both_finite
    distance.masked_fill_(left_out, 0)
    max_abs, at = away.max(dim=0)
    place = int(at) if float(max_abs) > 0 else None
    return Difference(
        num_different=int(different.count_nonzero()),
        first=int(different.to(torch.uint8).argmax()),
        at=place,
        candidate_value=0.0 if place is None else float(c[place]),
        baseline_value=0.0 if place is None else float(b[place]),
        max_abs=float(max_abs),
        ulp_counts=_class_counts(distance, int(left_out.count_nonzero())),
        max_ulp=int(distance.max()),
        num_sign_flips=int(flips.count_nonzero()),
        num_non_finite=num_non_finite,
    )


def _class_counts(distance: Tensor, num_left_out: int) -> tuple[int, ...]:
    """Counts by ``ULP_CLASSES``; elements that are left out have a distance of zero here."""
    beyond = ULP_EDGES[-1] + 1
    up_to = torch.bincount(distance.clamp(max=beyond), minlength=beyond + 1).cumsum(0)
    sums = up_to[[*ULP_EDGES, beyond]].tolist()
    first, *others = (after - before for before, after in zip([0, *sums[:-1]], sums, strict=True))
    return (first - num_left_out, *others)


def _joined(before: Difference, after: Difference, start: int) -> Difference:
    """Two comparisons of neighbouring slices as one; ``start`` is the flat index of the second's first element."""
    larger = after if after.max_abs > before.max_abs else before
    offset = start if larger is after else 0
    return Difference(
        num_different=before.num_different + after.num_different,
        first=before.first if before.first is not None or after.first is None else start + after.first,
        at=None if larger.at is None else offset + larger.at,
        candidate_value=larger.candidate_value,
        baseline_value=larger.baseline_value,
        max_abs=larger.max_abs,
        ulp_counts=tuple(a + b for a, b in zip(before.ulp_counts, after.ulp_counts, strict=True)),
        max_ulp=max(before.max_ulp, after.max_ulp),
        num_sign_flips=before.num_sign_flips + after.num_sign_flips,
        num_non_finite=before.num_non_finite + after.num_non_finite,
    )


def _finite_rms(flat: Tensor, device: str | torch.device, slice_values: int) -> float:
    squares, num = 0.0, 0
    for piece in _slices(flat, slice_values):
        value = piece.to(device).double()
        own, count = float(value.dot(value)), value.numel()
        if not math.isfinite(own):
            value = value[value.isfinite()]
            own, count = float(value.dot(value)), value.numel()
        squares += own
        num += count
    return math.sqrt(squares / max(1, num))


def _slices(flat: Tensor, slice_values: int) -> Iterator[Tensor]:
    for start in range(0, flat.numel(), slice_values):
        yield flat[start : start + slice_values]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])
