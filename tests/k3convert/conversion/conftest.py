"""Conversions as one call, and folders compared file by file."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path

import pytest

from k3convert.execution.conversion import ConversionReport, RunOptions, run_conversion
from k3convert.planning.dcp_to_hf import ToHfOptions, plan_dcp_to_hf
from k3convert.planning.hf_to_dcp import ToDcpOptions, plan_hf_to_dcp

Convert = Callable[..., ConversionReport]


@pytest.fixture
def to_dcp() -> Convert:
    """Convert an HF folder to a DCP folder; options as keywords, ``run`` for how."""

    def convert(source: Path, destination: Path, run: RunOptions | None = None, **options: object) -> ConversionReport:
        plan = plan_hf_to_dcp(source, destination, ToDcpOptions(**options))  # type: ignore[arg-type]
        return run_conversion(plan, run or RunOptions())

    return convert


@pytest.fixture
def to_hf() -> Convert:
    """Convert a DCP folder to an HF folder; options as keywords, ``run`` for how."""

    def convert(source: Path, destination: Path, run: RunOptions | None = None, **options: object) -> ConversionReport:
        plan = plan_dcp_to_hf(source, destination, ToHfOptions(**options))  # type: ignore[arg-type]
        return run_conversion(plan, run or RunOptions())

    return convert


@pytest.fixture
def assert_same_folders() -> Callable[[Path, Path], None]:
    """Fail unless two folders hold the same files with the same bytes."""

    def check(one: Path, other: Path) -> None:
        names = sorted(path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file())
        assert names == sorted(path.relative_to(other).as_posix() for path in other.rglob("*") if path.is_file())
        different = [name for name in names if not filecmp.cmp(one / name, other / name, shallow=False)]
        assert not different

    return check
