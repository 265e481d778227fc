"""Field reports C5, C6 and C11: full disks, kills, and what may be called a result."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3convert.errors import ExitCode, K3Error, NoSpace, NotPossibleHere, UsageError
from k3convert.execution import conversion
from k3convert.execution.conversion import RunOptions
from k3convert.planning.inspection import inspect_checkpoint

Convert = Callable[..., Any]

SLOW_RUN = """
import sys, time
from k3convert.execution.operations import ItemRunner
real = ItemRunner.run
def slow(self, item):
    time.sleep(0.3)
    return real(self, item)
ItemRunner.run = slow
from k3convert.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


class Usage:
    free = 1 << 40


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 1 MiB that says it has space, as one does that others fill."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this machine may not mount a small file system: {mounted.stderr.strip()}")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: Usage)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def grow(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)


def same_files(one: Path, other: Path) -> bool:
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    return names == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file()) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


@pytest.mark.parametrize("job", ["hf-to-dcp", "dcp-to-hf"])
def test_c6_a_disk_that_fills_leaves_no_result_and_the_run_goes_on_when_there_is_space(
    small_source: Path, small_dcp: Path, small_disk: Path, to_dcp: Convert, to_hf: Convert, job: str
) -> None:
    convert, source, wanted = (
        (to_dcp, small_source, small_dcp) if job == "hf-to-dcp" else (to_hf, small_dcp, small_source)
    )

    with pytest.raises(NoSpace) as caught:
        convert(source, small_disk / "result")
    left = sorted(path.name for path in small_disk.iterdir())
    grow(small_disk)
    convert(source, small_disk / "result")

    assert caught.value.exit_code == ExitCode.NOT_POSSIBLE_HERE
    assert left == ["result.partial"]
    assert same_files(wanted, small_disk / "result")
    assert not (small_disk / "result.partial").exists()


def test_c6_a_disk_that_fills_leaves_the_previous_result_untouched(
    small_source: Path, small_disk: Path, to_dcp: Convert, tmp_path: Path
) -> None:
    to_dcp(small_source, tmp_path / "previous", num_layers=1)
    shutil.copytree(tmp_path / "previous", small_disk / "result")

    with pytest.raises(NoSpace):
        to_dcp(small_source, small_disk / "result", RunOptions(overwrite=True))

    assert same_files(tmp_path / "previous", small_disk / "result")


def test_c6_a_disk_that_is_full_from_the_start_is_no_bug(small_source: Path, small_disk: Path, to_dcp: Convert) -> None:
    with pytest.raises(OSError, match="No space"), open(small_disk / "filler", "wb") as filler:
        filler.write(bytes(2 << 20))

    with pytest.raises((NoSpace, OSError)):
        to_dcp(small_source, small_disk / "result")

    assert not (small_disk / "result").exists()


def test_c6_space_is_checked_before_anything_is_written(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_dcp: Convert
) -> None:
    monkeypatch.setattr(Usage, "free", 1000)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: Usage)

    with pytest.raises(NoSpace, match="1000 B free"):
        to_dcp(small_source, tmp_path / "dcp")

    assert not list(tmp_path.glob("dcp*"))


def test_c6_a_destination_on_another_device_is_not_half_replaced(
    small_source: Path, small_disk: Path, to_dcp: Convert
) -> None:
    """The destination is a mount point: it can neither be renamed nor exchanged."""
    grow(small_disk)

    with pytest.raises(NotPossibleHere) as caught:
        to_dcp(small_source, small_disk, RunOptions(overwrite=True))

    assert caught.value.exit_code == ExitCode.NOT_POSSIBLE_HERE
    assert not list(small_disk.iterdir())
    assert small_disk.with_name("disk.partial").is_dir()


@pytest.mark.parametrize("place", ["same", "inside", "around", "through a link"])
def test_c6_a_source_is_never_overwritten_by_its_own_conversion(
    small: Path, small_source: Path, tmp_path: Path, to_dcp: Convert, place: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    around = tmp_path / "around"
    around.mkdir()
    shutil.copyfile(small / "config.json", around / "config.json")
    source = Path(shutil.move(small, around / "k3"))
    destination = {
        "same": source,
        "inside": source / "dcp",
        "around": around,
        "through a link": tmp_path / "link" / "around" / "k3",
    }[place]

    with pytest.raises(UsageError, match="source"):
        to_dcp(source, destination, RunOptions(overwrite=True))

    assert same_files(small_source, source)


def test_c6_a_dcp_is_never_overwritten_by_its_own_conversion(small_dcp: Path, tmp_path: Path, to_hf: Convert) -> None:
    dcp = Path(shutil.copytree(small_dcp, tmp_path / "dcp"))

    with pytest.raises(UsageError, match="is the source itself"):
        to_hf(dcp, dcp, RunOptions(overwrite=True))

    assert same_files(small_dcp, dcp)


@pytest.mark.parametrize("job", ["hf-to-dcp", "dcp-to-hf"])
def test_c5_a_killed_conversion_leaves_nothing_under_the_final_name(
    small_source: Path, small_dcp: Path, tmp_path: Path, job: str
) -> None:
    source = small_source if job == "hf-to-dcp" else small_dcp
    command = [sys.executable, "-c", SLOW_RUN, job, str(source), str(tmp_path / "result"), "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        written = tmp_path / "result.partial" / "result"
        deadline = time.monotonic() + 60
        while not (written.is_dir() and any(written.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.kill()
    process.wait()

    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "result").exists()
    with pytest.raises(K3Error):
        inspect_checkpoint(tmp_path / "result")


def test_c5_an_unfinished_result_is_no_checkpoint_for_any_reader(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_dcp: Convert
) -> None:
    """Everything is written but the last step: the folder has no ``.metadata`` yet."""

    def fail(*_: object) -> dict[str, object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "finish_dcp", fail)
    with pytest.raises(KeyboardInterrupt):
        to_dcp(small_source, tmp_path / "dcp")

    unfinished = tmp_path / "dcp.partial" / "result"
    assert any(unfinished.glob("*.distcp"))
    assert not (unfinished / ".metadata").exists()
    with pytest.raises(K3Error):
        inspect_checkpoint(unfinished)


def test_c5_the_marker_is_written_after_all_else(
    small_source: Path,
    small_dcp: Path,
    tmp_path: Path,
    to_dcp: Convert,
    to_hf: Convert,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    real = Path.write_bytes

    def write(path: Path, data: bytes) -> int:
        order.append(path.name)
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    to_dcp(small_source, tmp_path / "dcp")
    to_dcp_order, order = order, []
    to_hf(small_dcp, tmp_path / "hf", max_shard_bytes=200_000)

    assert to_dcp_order[-1] == ".metadata"
    assert order[-1] == "model.safetensors.index.json"


def test_c11_success_means_a_result_that_opens(small_source: Path, tmp_path: Path) -> None:
    from k3convert.cli.app import run

    assert run(["hf-to-dcp", str(small_source), str(tmp_path / "dcp"), "--quiet"]) == ExitCode.DONE
    assert inspect_checkpoint(tmp_path / "dcp").ok


def test_c11_failure_is_never_exit_0(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from k3convert.cli.app import run

    next(small.glob("*.safetensors")).unlink()

    assert run(["hf-to-dcp", str(small), str(tmp_path / "dcp")]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "dcp").exists()
