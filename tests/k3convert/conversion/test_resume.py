"""Interrupted conversions: what is resumed, what is refused, and what never appears under the final name."""

from __future__ import annotations

import filecmp
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k3convert.errors import DestinationExists, ResumeRefused, UsageError
from k3convert.execution.conversion import ConversionReport, RunOptions, run_conversion
from k3convert.execution.events import Advanced, Event
from k3convert.execution.parts import Part
from k3convert.planning.hf_to_dcp import ToDcpOptions, plan_hf_to_dcp

Convert = Callable[..., ConversionReport]
SameFolders = Callable[[Path, Path], None]
SMALL_CHUNKS = 4_000


class Interruption:
    """An event sink that interrupts the run after a number of progress events."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, event: Event) -> None:
        if isinstance(event, Advanced):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt


def interrupt(source: Path, destination: Path, after: int, **options: object) -> None:
    plan = plan_hf_to_dcp(source, destination, ToDcpOptions(**options))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        run_conversion(plan, RunOptions(workers=1), Interruption(after))


@pytest.mark.parametrize("after", [0, 10, 40])
def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(
    small_source: Path, tmp_path: Path, to_dcp: Convert, assert_same_folders: SameFolders, after: int
) -> None:
    to_dcp(small_source, tmp_path / "undisturbed", chunk_bytes=SMALL_CHUNKS)
    interrupt(small_source, tmp_path / "dcp", after, chunk_bytes=SMALL_CHUNKS)
    assert not (tmp_path / "dcp").exists()

    report = to_dcp(small_source, tmp_path / "dcp", chunk_bytes=SMALL_CHUNKS)

    assert report.resumed_bytes > 0 or after == 0
    assert not (tmp_path / "dcp.partial").exists()
    assert_same_folders(tmp_path / "undisturbed", tmp_path / "dcp")


def test_journaled_items_are_not_written_again(small_source: Path, tmp_path: Path, to_dcp: Convert) -> None:
    interrupt(small_source, tmp_path / "dcp", 20, chunk_bytes=SMALL_CHUNKS)
    result = tmp_path / "dcp.partial" / "result"
    first = sorted(result.glob("*.distcp"))[0]
    with open(first, "r+b") as file:
        file.seek(2_000)
        file.write(b"written by the test")

    to_dcp(small_source, tmp_path / "dcp", chunk_bytes=SMALL_CHUNKS)

    with open(tmp_path / "dcp" / first.name, "rb") as file:
        file.seek(2_000)
        assert file.read(19) == b"written by the test"


def test_a_torn_last_line_of_the_journal_is_done_again(
    small_source: Path, tmp_path: Path, to_dcp: Convert, assert_same_folders: SameFolders
) -> None:
    to_dcp(small_source, tmp_path / "undisturbed", chunk_bytes=SMALL_CHUNKS)
    interrupt(small_source, tmp_path / "dcp", 20, chunk_bytes=SMALL_CHUNKS)
    journal = tmp_path / "dcp.partial" / "part-0-of-1.journal"
    os.truncate(journal, journal.stat().st_size - 9)

    to_dcp(small_source, tmp_path / "dcp", chunk_bytes=SMALL_CHUNKS)

    assert_same_folders(tmp_path / "undisturbed", tmp_path / "dcp")


def test_other_options_are_refused_with_the_difference(small_source: Path, tmp_path: Path, to_dcp: Convert) -> None:
    interrupt(small_source, tmp_path / "dcp", 5, chunk_bytes=SMALL_CHUNKS)

    with pytest.raises(ResumeRefused) as caught:
        to_dcp(small_source, tmp_path / "dcp", chunk_bytes=SMALL_CHUNKS, allow_nan_scales=True)

    assert any(line == "options.allow_nan_scales: it was False, it is True" for line in caught.value.offenders)
    assert "--no-resume" in str(caught.value.hint)


def test_a_changed_source_is_refused_by_its_name(small: Path, tmp_path: Path, to_dcp: Convert) -> None:
    interrupt(small, tmp_path / "dcp", 5, chunk_bytes=SMALL_CHUNKS)
    shard = sorted(small.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(ResumeRefused) as caught:
        to_dcp(small, tmp_path / "dcp", chunk_bytes=SMALL_CHUNKS)

    assert [shard.name in line for line in caught.value.offenders] == [True]


def test_no_resume_starts_anew(
    small_source: Path, tmp_path: Path, to_dcp: Convert, assert_same_folders: SameFolders
) -> None:
    to_dcp(small_source, tmp_path / "undisturbed")
    interrupt(small_source, tmp_path / "dcp", 5, chunk_bytes=SMALL_CHUNKS)

    report = to_dcp(small_source, tmp_path / "dcp", RunOptions(resume=False))

    assert report.resumed_bytes == 0
    assert_same_folders(tmp_path / "undisturbed", tmp_path / "dcp")


def test_an_existing_destination_is_left_alone(small_source: Path, tmp_path: Path, to_dcp: Convert) -> None:
    to_dcp(small_source, tmp_path / "dcp")

    with pytest.raises(DestinationExists):
        to_dcp(small_source, tmp_path / "dcp")


def test_overwrite_keeps_the_old_result_until_the_new_one_is_whole(
    small_source: Path, tmp_path: Path, to_dcp: Convert, assert_same_folders: SameFolders
) -> None:
    to_dcp(small_source, tmp_path / "old", experts="bf16")
    to_dcp(small_source, tmp_path / "new")
    shutil.copytree(tmp_path / "old", tmp_path / "dcp")
    plan = plan_hf_to_dcp(small_source, tmp_path / "dcp", ToDcpOptions())
    with pytest.raises(KeyboardInterrupt):
        run_conversion(plan, RunOptions(workers=1, overwrite=True), Interruption(3))
    assert_same_folders(tmp_path / "old", tmp_path / "dcp")

    to_dcp(small_source, tmp_path / "dcp", RunOptions(overwrite=True))

    assert_same_folders(tmp_path / "new", tmp_path / "dcp")
    assert not (tmp_path / "dcp.partial").exists()


def test_a_folder_that_is_no_checkpoint_is_never_replaced(small_source: Path, tmp_path: Path, to_dcp: Convert) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter-1.tex").write_text("years of work")

    with pytest.raises(DestinationExists, match="no checkpoint"):
        to_dcp(small_source, tmp_path / "thesis", RunOptions(overwrite=True))


def test_two_processes_do_not_write_one_destination(small_source: Path, tmp_path: Path, to_dcp: Convert) -> None:
    from k3convert.execution.partial_folder import PartialFolder

    plan = plan_hf_to_dcp(small_source, tmp_path / "dcp", ToDcpOptions())
    interrupt(small_source, tmp_path / "dcp", 0)
    other = PartialFolder(Path(plan.destination))
    other.lock("part-0-of-1")

    with pytest.raises(UsageError, match="another process"):
        to_dcp(small_source, tmp_path / "dcp")


@pytest.mark.parametrize("count", [2, 3, 50])
def test_parts_of_an_array_make_the_same_bytes(
    small_source: Path, tmp_path: Path, to_dcp: Convert, assert_same_folders: SameFolders, count: int
) -> None:
    to_dcp(small_source, tmp_path / "one")

    for index in reversed(range(count)):
        report = to_dcp(small_source, tmp_path / "dcp", RunOptions(part=Part(index, count)))
        assert not report.complete
    to_dcp(small_source, tmp_path / "dcp", RunOptions(finish_only=True))

    assert_same_folders(tmp_path / "one", tmp_path / "dcp")


def test_finish_refuses_while_a_part_is_missing(small_source: Path, tmp_path: Path, to_dcp: Convert) -> None:
    to_dcp(small_source, tmp_path / "dcp", RunOptions(part=Part(0, 2)))

    with pytest.raises(UsageError, match="items are not written yet"):
        to_dcp(small_source, tmp_path / "dcp", RunOptions(finish_only=True))

    assert not (tmp_path / "dcp").exists()


def same_bytes(one: Path, other: Path) -> bool:
    names = sorted(path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file())
    return names == sorted(path.relative_to(other).as_posix() for path in other.rglob("*") if path.is_file()) and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names
    )


def command(job: str, source: Path, destination: Path) -> list[str]:
    return [sys.executable, "-m", "k3convert", job, str(source), str(destination), "--quiet"]


def test_torchrun_splits_the_plan_and_makes_the_same_bytes(
    tiny_source: Path, tmp_path: Path, to_dcp: Convert, assert_same_folders: SameFolders
) -> None:
    to_dcp(tiny_source, tmp_path / "one")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    run = subprocess.run(
        [*torchrun, "-m", "k3convert", "hf-to-dcp", str(tiny_source), str(tmp_path / "dcp"), "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout.count("1,510 tensors") == 1
    assert_same_folders(tmp_path / "one", tmp_path / "dcp")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", ["hf-to-dcp", "dcp-to-hf"])
def test_ten_kills_at_random_moments_leave_the_same_bytes(tmp_path: Path, job: str) -> None:
    from k3convert.synthesis import make_checkpoint

    dice = random.Random(job)
    source = tmp_path / "k3"
    make_checkpoint(source, preset="many", num_layers=3, num_experts=300, seed=0, sparse=False)
    if job == "dcp-to-hf":
        subprocess.run(command("hf-to-dcp", source, tmp_path / "source-dcp"), check=True, capture_output=True)
        source = tmp_path / "source-dcp"
    subprocess.run(command(job, source, tmp_path / "undisturbed"), check=True, capture_output=True)

    kills = rounds = 0
    while kills < 10:
        rounds += 1
        assert rounds < 60, f"only {kills} kills hit a running conversion"
        destination = tmp_path / f"round-{rounds}"
        kills += kill_until_done(job, source, destination, dice)
        assert same_bytes(tmp_path / "undisturbed", destination)
        shutil.rmtree(destination)


def kill_until_done(job: str, source: Path, destination: Path, dice: random.Random) -> int:
    """Start, kill at a random moment once work has begun, start again; the number of kills that hit."""
    kills = 0
    partial = destination.with_name(destination.name + ".partial")
    while not destination.exists():
        process = subprocess.Popen(command(job, source, destination), stdout=subprocess.DEVNULL)
        while process.poll() is None and not partial.exists():
            time.sleep(0.002)
        if kills < 3:
            time.sleep(dice.uniform(0, 0.4))
        else:
            process.wait()
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not destination.exists() or same_names(destination)
            kills += 1
        else:
            assert process.returncode == 0
    return kills


def same_names(destination: Path) -> bool:
    """A folder under its final name is whole: it has what marks a finished checkpoint."""
    return (destination / ".metadata").exists() or (destination / "model.safetensors.index.json").exists()
