"""Conversions as calls, and refusals that leave nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3convert.errors import BadInput, ExitCode, K3Error
from k3convert.execution.conversion import ConversionReport, RunOptions, run_conversion
from k3convert.planning.dcp_to_hf import ToHfOptions, plan_dcp_to_hf
from k3convert.planning.hf_to_dcp import ToDcpOptions, plan_hf_to_dcp

Convert = Callable[..., ConversionReport]
Refused = Callable[..., str]


def convert_to_dcp(source: Path, destination: Path, run: RunOptions | None = None, **options: Any) -> ConversionReport:
    return run_conversion(plan_hf_to_dcp(source, destination, ToDcpOptions(**options)), run or RunOptions())


def convert_to_hf(source: Path, destination: Path, run: RunOptions | None = None, **options: Any) -> ConversionReport:
    return run_conversion(plan_dcp_to_hf(source, destination, ToHfOptions(**options)), run or RunOptions())


def everything_said(error: K3Error) -> str:
    """Message, offenders, cause and hint, one a line."""
    return "\n".join([str(error), *error.offenders, error.cause or "", error.hint or ""])


@pytest.fixture
def to_dcp() -> Convert:
    """Convert an HF folder; options as keywords, ``run`` for how."""
    return convert_to_dcp


@pytest.fixture
def to_hf() -> Convert:
    """Convert a DCP folder; options as keywords, ``run`` for how."""
    return convert_to_hf


def _refusal(convert: Convert, source: Path, destination: Path, kind: type[BadInput], options: dict[str, Any]) -> str:
    with pytest.raises(kind) as caught:
        convert(source, destination, **options)

    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert not destination.exists()
    return everything_said(caught.value)


@pytest.fixture
def refused_by_hf_to_dcp(tmp_path: Path) -> Refused:
    """Demand that ``hf-to-dcp`` refuses a source with exit code 4 and leaves no destination; what it said."""

    def check(source: Path, kind: type[BadInput] = BadInput, **options: Any) -> str:
        return _refusal(convert_to_dcp, source, tmp_path / "refused-dcp", kind, options)

    return check


@pytest.fixture
def refused_by_dcp_to_hf(tmp_path: Path) -> Refused:
    """Demand that ``dcp-to-hf`` refuses a source with exit code 4 and leaves no destination; what it said."""

    def check(source: Path, kind: type[BadInput] = BadInput, **options: Any) -> str:
        return _refusal(convert_to_hf, source, tmp_path / "refused-hf", kind, options)

    return check


@pytest.fixture(scope="session")
def small_dcp(small_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint as a packed DCP; read it, never write to it."""
    folder = tmp_path_factory.mktemp("dcp") / "packed"
    convert_to_dcp(small_source, folder)
    return folder


@pytest.fixture
def dcp(small_dcp: Path, tmp_path: Path) -> Path:
    """A copy of the packed DCP that a test may change."""
    return Path(shutil.copytree(small_dcp, tmp_path / "dcp"))
