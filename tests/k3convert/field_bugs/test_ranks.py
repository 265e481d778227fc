"""Field reports A23 and C12: several ranks of one conversion, one of which fails or is slow."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

# What goes wrong on one rank is set by K3_TEST_FAULT; the command line is the tool's own.
RANK_MAIN = """
import errno, os, sys, time
import k3convert.checkpoint.hf_folder as hf_folder
from k3convert.execution import operations

fault, _, rank = os.environ["K3_TEST_FAULT"].rpartition(" of ")
if os.environ["RANK"] == rank:
    slept = []
    real_read, real_run = hf_folder.read_regular, operations.ItemRunner.run

    def read(path):
        if path.name == "config.json" and fault == "unreadable config":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real_read(path)

    def run_item(self, item):
        if fault == "bug":
            raise RuntimeError("nobody expected this")
        if fault == "slow" and not slept:
            slept.append(True)
            time.sleep(4)
        return real_run(self, item)

    hf_folder.read_regular, operations.ItemRunner.run = read, run_item

from k3convert.cli.app import run

sys.exit(run(sys.argv[1:]))
"""


class Rank:
    """One process of a run, with the environment that torchrun gives."""

    def __init__(self, script: Path, arguments: list[str], rank: int, fault: str) -> None:
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": script.parent.name,
            "K3_TEST_FAULT": fault,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, timeout_s: float = 30.0) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank_main.py"
    path.write_text(RANK_MAIN)
    return path


@pytest.mark.parametrize("failing", [0, 1])
def test_a23_a_config_that_one_rank_cannot_read_ends_every_rank_with_its_reason(
    small_source: Path, tmp_path: Path, script: Path, failing: int
) -> None:
    arguments = ["hf-to-dcp", str(small_source), str(tmp_path / "dcp")]
    started = time.monotonic()

    ranks = [Rank(script, arguments, rank, f"unreadable config of {failing}") for rank in range(2)]
    ends = [rank.end() for rank in ranks]

    assert [code for code, _, _ in ends] == [4, 4]
    reason = f"{small_source / 'config.json'} cannot be read: Input/output error"
    assert all(reason in err for _, _, err in ends)
    assert f"rank {failing} failed" in ends[1 - failing][2]
    assert time.monotonic() - started < 20
    assert not (tmp_path / "dcp").exists()


def test_a23_a_bug_in_one_rank_ends_the_other_too(small_source: Path, tmp_path: Path, script: Path) -> None:
    arguments = ["hf-to-dcp", str(small_source), str(tmp_path / "dcp")]

    ranks = [Rank(script, arguments, rank, "bug of 1") for rank in range(2)]
    ends = [rank.end() for rank in ranks]

    assert [code for code, _, _ in ends] == [5, 70]
    assert all("nobody expected this" in err for _, _, err in ends)
    assert not (tmp_path / "dcp").exists()


def test_a23_under_json_one_document_is_printed_by_all_ranks_together(
    small_source: Path, tmp_path: Path, script: Path
) -> None:
    import json

    arguments = ["hf-to-dcp", str(small_source), str(tmp_path / "dcp"), "--json"]

    ranks = [Rank(script, arguments, rank, "unreadable config of 1") for rank in range(2)]
    ends = [rank.end() for rank in ranks]

    assert ends[1][1] == ""
    assert json.loads(ends[0][1])["exit_code"] == 4


def test_a23_a_run_that_failed_can_be_repeated(small_source: Path, tmp_path: Path, script: Path) -> None:
    arguments = ["hf-to-dcp", str(small_source), str(tmp_path / "dcp")]
    failed = [Rank(script, arguments, rank, "unreadable config of 1") for rank in range(2)]
    assert [rank.end()[0] for rank in failed] == [4, 4]
    # the note of a failure counts as old after five seconds
    note = next((tmp_path / "dcp.partial").glob("failed-*"))
    os.utime(note, (time.time() - 60, time.time() - 60))

    ranks = [Rank(script, arguments, rank, "none of 9") for rank in range(2)]
    ends = [rank.end() for rank in ranks]

    assert [code for code, _, _ in ends] == [0, 0], ends
    assert (tmp_path / "dcp" / ".metadata").exists()


def test_c12_no_rank_waits_for_a_slow_one(small_source: Path, tmp_path: Path, script: Path) -> None:
    """Rank 0 works for seconds; rank 1 does its part and leaves: there is no collective to time out."""
    arguments = ["hf-to-dcp", str(small_source), str(tmp_path / "dcp"), "--workers", "1"]

    slow = Rank(script, arguments, 0, "slow of 0")
    quick = Rank(script, arguments, 1, "slow of 0")
    code, _, err = quick.end()
    was_working = slow.process.poll() is None
    ends = slow.end(120)

    assert (code, err) == (0, "")
    assert was_working
    assert ends[0] == 0, ends
    assert (tmp_path / "dcp" / ".metadata").exists()


def test_c12_a_conversion_opens_no_process_group() -> None:
    import k3convert

    root = Path(k3convert.__file__).parent
    folders = ("checkpoint", "mapping", "numerics", "planning", "execution", "synthesis")
    sources = [path.read_text() for folder in folders for path in (root / folder).rglob("*.py")]

    assert len(sources) > len(folders)
    assert not any("init_process_group" in text or "import torch.distributed" in text for text in sources)


@pytest.mark.slow
def test_a23_torchrun_ends_within_seconds_when_one_rank_fails(small_source: Path, tmp_path: Path, script: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    started = time.monotonic()

    run = subprocess.run(
        [*command, "hf-to-dcp", str(small_source), str(tmp_path / "dcp")],
        env=os.environ | {"K3_TEST_FAULT": "unreadable config of 1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert run.returncode != 0
    assert "cannot be read: Input/output error" in run.stderr
    assert not (tmp_path / "dcp").exists()
    assert time.monotonic() - started < 60
