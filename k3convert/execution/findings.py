"""Faults found in the data while it moves: collected from all workers, so that every offender is counted."""

from __future__ import annotations

import threading

from k3convert.errors import BadQuantization, CensusMismatch, DigestMismatch, K3Error, UnrepresentableBlocks

MAX_KEPT = 10_000


class Findings:
    """Offending blocks and tensors, by kind. Once there is one, nothing more is written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unrepresentable: list[str] = []
        self._nan_scales: list[str] = []
        self._mismatches: list[str] = []
        self._not_finite: list[str] = []
        self._padding: list[str] = []
        self._counts = {"unrepresentable": 0, "nan_scales": 0, "mismatches": 0, "not_finite": 0, "padding": 0}

    @property
    def any(self) -> bool:
        """Whether anything was found."""
        return any(self._counts.values())

    def _add(self, kind: str, kept: list[str], lines: list[str], count: int) -> None:
        with self._lock:
            self._counts[kind] += count
            kept.extend(lines[: max(0, MAX_KEPT - len(kept))])

    def unrepresentable(self, lines: list[str], count: int) -> None:
        """Blocks without a finite bf16 form."""
        self._add("unrepresentable", self._unrepresentable, lines, count)

    def nan_scales(self, line: str, count: int) -> None:
        """Scale bytes of 255."""
        self._add("nan_scales", self._nan_scales, [line], count)

    def mismatch(self, line: str) -> None:
        """A tensor whose bytes are not those that were recorded."""
        self._add("mismatches", self._mismatches, [line], 1)

    def not_finite(self, line: str, count: int) -> None:
        """Values that are NaN or infinite and cannot be quantised."""
        self._add("not_finite", self._not_finite, [line], count)

    def padding(self, line: str) -> None:
        """A tensor whose padding is not zero, so that it cannot be taken away."""
        self._add("padding", self._padding, [line], 1)

    def error(self) -> K3Error | None:
        """The worst kind as an error with all its offenders, or None."""
        counts = self._counts
        if counts["mismatches"]:
            return DigestMismatch(
                f"{counts['mismatches']} tensors differ from their recorded digests", offenders=self._mismatches
            )
        if counts["unrepresentable"]:
            return UnrepresentableBlocks(
                f"{counts['unrepresentable']} MXFP4 blocks have no finite bf16 form",
                offenders=self._unrepresentable,
                hint="--experts packed carries scale bytes 253 and 254, and 255 with --allow-nan-scales",
            )
        if counts["nan_scales"]:
            return BadQuantization(
                f"{counts['nan_scales']} scale bytes are 255 (NaN) in {len(self._nan_scales)} tensors",
                offenders=self._nan_scales,
                hint="--allow-nan-scales moves them as they are",
            )
        if counts["not_finite"]:
            return BadQuantization(
                f"{counts['not_finite']} values to quantise are NaN or infinite", offenders=self._not_finite
            )
        if counts["padding"]:
            return CensusMismatch(
                f"{counts['padding']} tensors hold values where the base has no place for them", offenders=self._padding
            )
        return None
