"""A saved step is complete or it is explained; nothing half-written is resumed from, nothing newest is removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3convert.training.checkpoints.step_folders import (
    MARKER,
    begin,
    complete,
    growing_path,
    newest_complete,
    prune,
    step_path,
)


def save(out: Path, step: int) -> Path:
    folder = begin(out, step)
    (folder / ".metadata").write_bytes(b"m" * 10)
    (folder / "__0_0.distcp").write_bytes(b"d" * 100)
    return complete(out, step, {"layout": ""})


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_the_newest_complete_step_is_found_by_its_number(tmp_path: Path) -> None:
    for step in (20, 100, 40):
        save(tmp_path, step)

    found = newest_complete(tmp_path)

    assert (found.path, found.step, found.skipped) == (step_path(tmp_path, 100), 100, ())


def test_without_a_step_there_is_none(tmp_path: Path) -> None:
    assert newest_complete(tmp_path).path is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MARKER).unlink(), "has no complete.json"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"d" * 99), "has 99 of 100 bytes"),
        (lambda folder: (folder / MARKER).write_text("{"), "cannot be read"),
        (lambda folder: folder.rename(folder.with_name("step-40.saving")), "its save was cut short"),
    ],
)
def test_a_damaged_step_is_passed_over_with_its_reason(tmp_path: Path, damage: object, reason: str) -> None:
    save(tmp_path, 20)
    damage(save(tmp_path, 40))  # type: ignore[operator]

    found = newest_complete(tmp_path)

    assert found.step == 20
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("step-40")
    assert reason in found.skipped[0]


def test_a_step_still_growing_has_no_name_yet(tmp_path: Path) -> None:
    begin(tmp_path, 20)

    assert names(tmp_path) == ["step-20.saving"]
    assert newest_complete(tmp_path).path is None


def test_what_an_earlier_try_left_does_not_come_into_the_step(tmp_path: Path) -> None:
    (begin(tmp_path, 20) / "__7_0.distcp").write_bytes(b"old")

    folder = save(tmp_path, 20)

    assert set(json.loads((folder / MARKER).read_text())["files"]) == {".metadata", "__0_0.distcp"}


def test_an_incomplete_folder_of_the_name_gives_way(tmp_path: Path) -> None:
    (save(tmp_path, 20) / MARKER).unlink()

    save(tmp_path, 20)

    assert newest_complete(tmp_path).step == 20
    assert not growing_path(tmp_path, 20).exists()


def test_pruning_keeps_the_newest_complete_steps_and_what_is_newer(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    (step_path(tmp_path, 20) / MARKER).unlink()
    (step_path(tmp_path, 50) / MARKER).unlink()

    prune(tmp_path, 2)

    assert names(tmp_path) == ["step-30", "step-40", "step-50"]


def test_keeping_zero_keeps_all(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)

    prune(tmp_path, 0)

    assert names(tmp_path) == ["step-10", "step-20"]
