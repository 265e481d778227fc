"""The memory limit holds, measured from outside as the peak of the whole process, mapped pages included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from k3convert.errors import ExitCode

MIB = 1 << 20
LIMIT_MIB = 224


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 450 MB, twice the limit, in experts of the released size."""
    from k3convert.synthesis import make_checkpoint

    folder = tmp_path_factory.mktemp("memory") / "k3"
    make_checkpoint(folder, preset="large", num_layers=2, num_experts=24, seed=0, sparse=False)
    return folder


# A child counts the memory of the process that forked it, so a small one stands between this one and the command.
LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
"""


def peak_bytes(*arguments: str) -> int:
    """Peak resident bytes of one command, which must succeed."""
    command = [sys.executable, "-m", "k3convert", *arguments, "--quiet"]
    run = subprocess.run([sys.executable, "-S", "-c", LAUNCHER, *command], capture_output=True, text=True, check=True)
    code, peak = map(int, run.stdout.split())
    assert code == 0, run.stderr
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["packed", "bf16"])
def test_both_directions_stay_within_the_limit(source: Path, tmp_path: Path, experts: str) -> None:
    limit = ("--memory-limit", f"{LIMIT_MIB}M")

    to_dcp = peak_bytes("hf-to-dcp", str(source), str(tmp_path / "dcp"), "--experts", experts, *limit)
    to_hf = peak_bytes("dcp-to-hf", str(tmp_path / "dcp"), str(tmp_path / "hf"), *limit)

    assert max(to_dcp, to_hf) <= LIMIT_MIB * MIB


@pytest.mark.slow
def test_a_chunk_larger_than_the_limit_is_gathered_within_it(source: Path, tmp_path: Path) -> None:
    stack = "language_model.model.layers.1.block_sparse_moe.experts.w1"
    peak_bytes("hf-to-dcp", str(source), str(tmp_path / "ours"), "--experts", "bf16", "--no-keep-scales")
    reader = dcp.FileSystemReader(str(tmp_path / "ours"))
    entries = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    dcp.save(state, checkpoint_id=str(tmp_path / "foreign"), no_dist=True)
    assert state[stack].nbytes > LIMIT_MIB * MIB

    peak = peak_bytes(
        "dcp-to-hf", str(tmp_path / "foreign"), str(tmp_path / "hf"), "--like", str(source),
        "--memory-limit", f"{LIMIT_MIB}M",
    )  # fmt: skip

    assert peak <= LIMIT_MIB * MIB


def test_a_limit_that_nothing_fits_is_refused_with_what_is_needed(small_source: Path, tmp_path: Path) -> None:
    job = ["hf-to-dcp", str(small_source), str(tmp_path / "dcp"), "--memory-limit", "20M", "--json"]

    run = subprocess.run(
        [sys.executable, "-m", "k3convert", *job],
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == ExitCode.USAGE
    assert "too small here" in json.loads(run.stdout)["error"]["message"]
    assert not (tmp_path / "dcp").exists()
