"""The command: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from k3convert.cli.app import run
from k3convert.errors import ExitCode
from k3convert.parity.report.document import read_json

SHORT = ("--seq", "24", "--batch", "2", "--quiet")


def test_a_pass_and_a_cell_that_cannot_run_here_are_reported_apart(
    small_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "report"
    cells = ("--cell", "dtype=fp32", "--cell", "impl.kda=fla,dtype=fp32")

    code = run(["verify-parity", str(small_source), *cells, *SHORT, "--report", str(folder), "--json"])

    document = json.loads(capsys.readouterr().out)
    assert code == ExitCode.DONE
    assert document["passed"] is True
    assert document["counts"] == {"not run": 1, "passed": 1}
    assert read_json(folder / "report.json").model_dump(mode="json") == document
    assert "<html" in (folder / "report.html").read_text()
    suite = ElementTree.parse(folder / "junit.xml").getroot().find(".//testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("skipped")) == ("2", "1")


def test_a_planted_fault_exits_with_the_verdict_and_names_the_module(
    small_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["verify-parity", str(small_source), "--cell", "dtype=fp32", "--inject", "bf16-decay", *SHORT])

    assert code == ExitCode.VERDICT_NO
    assert "layers.2.self_attn.decay" in capsys.readouterr().out


def test_a_named_layout_that_does_not_fit_is_refused_with_the_nearest(
    small_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["verify-parity", str(small_source), "--cell", "sp=4", *SHORT])

    said = capsys.readouterr().err
    assert code == ExitCode.USAGE
    assert "6 heads" in said
    assert "nearest legal layout" in said


def test_where_nothing_can_run_nothing_has_passed(small_source: Path) -> None:
    code = run(["verify-parity", str(small_source), "--cell", "impl.kda=fla", *SHORT])

    assert code == ExitCode.NOT_POSSIBLE_HERE


def test_a_device_that_is_not_there_is_not_possible_here(small_source: Path) -> None:
    assert run(["verify-parity", str(small_source), "--device", "npu", *SHORT]) == ExitCode.NOT_POSSIBLE_HERE


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert run(["verify-parity", str(tmp_path), "--cell", "dtype=fp32", *SHORT]) == ExitCode.BAD_INPUT


@pytest.mark.slow
def test_ranks_that_do_not_answer_end_the_run_with_a_stack(
    small_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--cell", "dtype=fp32", "--seq", "4096", "--batch", "8", "--timeout", "1", "--quiet"]

    code = run(["verify-parity", str(small_source), *arguments])

    said = capsys.readouterr().err
    assert code == ExitCode.WORKER_DIED
    assert "did not answer within 1 s" in said
    assert "rank_run.py" in said


@pytest.mark.slow
def test_a_capture_is_judged_elsewhere_and_refused_for_another_batch(
    small_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "captures")
    cells = ("--cell", "sp=2,dtype=fp32", "--cell", "impl.attn=sdpa,dtype=bf16")

    codes = [
        run(["verify-parity", str(small_source), *cells, *SHORT, "--capture", folder]),
        run(["verify-parity", str(small_source), *SHORT, "--against", folder]),
        run(["verify-parity", str(small_source), *SHORT, "--against", folder, "--seed", "1"]),
    ]

    assert codes == [ExitCode.DONE, ExitCode.DONE, ExitCode.BAD_INPUT]
    assert "capture-mismatch" in capsys.readouterr().err


@pytest.mark.slow
def test_a_faulty_capture_fails_elsewhere(small_source: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "captures")

    run(
        [
            "verify-parity",
            str(small_source),
            "--cell",
            "dtype=fp32",
            *SHORT,
            "--inject",
            "swapped-w1-w3",
            "--capture",
            folder,
        ]
    )

    assert run(["verify-parity", str(small_source), *SHORT, "--against", folder]) == ExitCode.VERDICT_NO
