"""What quantising did is reported in full, whoever did which part of it."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3convert.errors import ResumeRefused
from k3convert.execution.conversion import ConversionReport, RunOptions
from k3convert.execution.parts import Part
from k3convert.execution.quantization_figures import QuantizationFigures

Convert = Callable[..., ConversionReport]


def test_the_figures_of_parts_add_up_to_those_of_one_run(
    small_source: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert
) -> None:
    to_dcp(small_source, tmp_path / "dcp", experts="bf16")
    whole = to_hf(tmp_path / "dcp", tmp_path / "one")

    for index in (1, 0):
        to_hf(tmp_path / "dcp", tmp_path / "parts", RunOptions(part=Part(index, 2)))
    finished = to_hf(tmp_path / "dcp", tmp_path / "parts", RunOptions(finish_only=True))

    assert whole.details["mxfp4"]["matrices"] == 4 * 4 * 3
    assert finished.details["mxfp4"] == whole.details["mxfp4"]


def test_figures_survive_the_journal_and_keep_the_worst_matrix() -> None:
    one = QuantizationFigures(1, 1, 10, 2, 1, 0, 0.5, 0.25, "a")
    other = QuantizationFigures(2, 0, 20, 0, 0, 1, 0.25, 0.5, "b")

    merged = QuantizationFigures(*other.journaled()).merged(one)

    assert merged == QuantizationFigures(3, 1, 30, 2, 1, 1, 0.5, 0.5, "a")


def test_a_damaged_journal_is_refused(small_source: Path, tmp_path: Path, to_dcp: Convert) -> None:
    to_dcp(small_source, tmp_path / "dcp", RunOptions(part=Part(0, 2)))
    with open(tmp_path / "dcp.partial" / "part-0-of-2.journal", "ab") as journal:
        journal.write(b"\0\0\0\n")

    with pytest.raises(ResumeRefused, match="damaged"):
        to_dcp(small_source, tmp_path / "dcp", RunOptions(part=Part(1, 2)))


def test_more_shards_than_the_usual_limit_of_open_files(
    small_source: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert
) -> None:
    soft, hard = 64, 4096
    to_dcp(small_source, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "many", max_shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > soft

    run = subprocess.run(
        [sys.executable, "-m", "k3convert", "hf-to-dcp", str(tmp_path / "many"), str(tmp_path / "again"), "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )

    assert run.returncode == 0, run.stderr
