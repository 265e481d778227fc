"""Nothing that is read, or that is not ours, is removed on the way to a result."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3convert.errors import DestinationExists, UsageError
from k3convert.execution.conversion import RunOptions, run_conversion
from k3convert.execution.events import Event, Started
from k3convert.planning.dcp_to_hf import ToHfOptions, plan_dcp_to_hf
from k3convert.planning.hf_to_dcp import ToDcpOptions, plan_hf_to_dcp

Convert = Callable[..., object]


def test_a_source_under_the_name_of_the_partial_folder_is_refused_and_kept(
    small_source: Path, to_dcp: Convert, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(small_source, tmp_path / "out.partial"))

    with pytest.raises(UsageError, match=r"out\.partial is the source itself"):
        to_dcp(source, tmp_path / "out")

    assert (source / "config.json").is_file()


@pytest.mark.parametrize("place", ["base.partial", "base.partial/inner"])
def test_a_base_under_the_name_of_the_partial_folder_is_refused_and_kept(
    small_source: Path, to_dcp: Convert, tmp_path: Path, place: str
) -> None:
    to_dcp(small_source, tmp_path / "dcp")
    base = Path(shutil.copytree(small_source, tmp_path / place))

    with pytest.raises(UsageError, match=r"base\.partial (is|holds) the base"):
        plan_dcp_to_hf(tmp_path / "dcp", tmp_path / "base", ToHfOptions(like=base))

    assert (base / "config.json").is_file()


def test_a_destination_inside_the_base_is_refused(small: Path, to_dcp: Convert, tmp_path: Path) -> None:
    to_dcp(small, tmp_path / "dcp")

    with pytest.raises(UsageError, match="lies inside the base"):
        plan_dcp_to_hf(tmp_path / "dcp", small / "new", ToHfOptions(like=small))


@pytest.mark.parametrize("name", [".", "/"])
def test_a_destination_without_a_name_is_refused(small_source: Path, to_dcp: Convert, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a new folder"):
        to_dcp(small_source, Path(name))


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_of_somebody_elses_under_the_partial_name_is_refused_and_kept(
    small_source: Path, to_dcp: Convert, tmp_path: Path, resume: bool
) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("precious")

    with pytest.raises(DestinationExists, match="no conversion wrote"):
        to_dcp(small_source, tmp_path / "out", RunOptions(resume=resume))

    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "precious"


def test_a_destination_that_appears_while_the_conversion_runs_is_kept_and_the_result_with_it(
    small_source: Path, to_dcp: Convert, tmp_path: Path
) -> None:
    destination = tmp_path / "out"

    def take_the_name(event: Event) -> None:
        if isinstance(event, Started):
            destination.mkdir()
            (destination / "thesis.txt").write_text("precious")

    with pytest.raises(DestinationExists, match="out exists"):
        run_conversion(plan_hf_to_dcp(small_source, destination, ToDcpOptions()), RunOptions(), take_the_name)

    assert (destination / "thesis.txt").read_text() == "precious"
    assert (tmp_path / "out.partial" / "result" / ".metadata").is_file()


def test_shards_of_no_bytes_are_refused(small_source: Path, to_dcp: Convert, to_hf: Convert, tmp_path: Path) -> None:
    to_dcp(small_source, tmp_path / "dcp")

    with pytest.raises(UsageError, match="at least 1 byte"):
        to_hf(tmp_path / "dcp", tmp_path / "back", max_shard_bytes=0)
