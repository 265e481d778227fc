"""Array jobs: ``--part I/N`` and ``--finish`` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


def same_files(one: Path, other: Path) -> bool:
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    return names == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file()) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("job", ["hf-to-dcp", "dcp-to-hf"])
def test_parts_in_any_order_make_the_bytes_of_one_run(
    command: Command, small_source: Path, small_dcp: Path, tmp_path: Path, job: str, order: tuple[int, int]
) -> None:
    source, wanted = (small_source, small_dcp) if job == "hf-to-dcp" else (small_dcp, small_source)

    parts = [command(job, source, tmp_path / "new", "--part", f"{index}/2", "--json") for index in order]
    before = (tmp_path / "new").exists()
    end = command(job, source, tmp_path / "new", "--finish", "--json")

    assert [part.code for part in parts] == [0, 0]
    assert [part.document["complete"] for part in parts] == [False, False]
    assert not before
    assert (end.code, end.document["complete"]) == (0, True)
    assert same_files(wanted, tmp_path / "new")


def test_finish_refuses_while_a_part_is_missing_and_goes_on_after_it(
    command: Command, small_source: Path, small_dcp: Path, tmp_path: Path
) -> None:
    arguments = ["hf-to-dcp", small_source, tmp_path / "new"]
    command(*arguments, "--part", "1/2")

    early = command(*arguments, "--finish", "--json")
    command(*arguments, "--part", "0/2")
    late = command(*arguments, "--finish")

    assert early.code == 2
    assert "items are not written yet" in early.document["error"]["message"]
    assert "--part" in early.document["error"]["hint"]
    assert late.code == 0
    assert same_files(small_dcp, tmp_path / "new")


def test_a_part_of_other_options_is_refused_with_the_difference(
    command: Command, small_source: Path, tmp_path: Path
) -> None:
    arguments = ["hf-to-dcp", small_source, tmp_path / "new"]
    command(*arguments, "--part", "0/2")

    outcome = command(*arguments, "--part", "1/2", "--chunk-size", "20K", "--json")

    assert outcome.code == 2
    assert outcome.document["error"]["code"] == "resume-refused"
    assert any("options.chunk_bytes" in line for line in outcome.document["error"]["offenders"])


def test_bad_data_in_one_part_is_exit_4_there_and_keeps_the_end_away(
    command: Command, small: Path, tmp_path: Path, edit_tensors: Callable[..., None]
) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        name = "language_model.model.layers.4.block_sparse_moe.experts.3.w2.weight_scale"
        tensors[name].data = b"\xff" * len(tensors[name].data)

    edit_tensors(small, spoil)
    arguments = ["hf-to-dcp", small, tmp_path / "new"]

    codes = [command(*arguments, "--part", f"{index}/2").code for index in range(2)]
    end = command(*arguments, "--finish")

    assert sorted(codes) == [0, 4]
    assert end.code == 2
    assert not (tmp_path / "new").exists()


def test_under_torchrun_parts_are_not_given_by_hand(
    command: Command, small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    assert command("hf-to-dcp", small_source, tmp_path / "new", "--part", "0/2").code == 2


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("-1", "2"), ("x", "2"), ("0", "y")])
def test_ranks_that_do_not_fit_are_refused(
    command: Command, small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, world: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)

    assert command("hf-to-dcp", small_source, tmp_path / "new").code == 2
