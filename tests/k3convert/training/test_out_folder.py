"""A run's folder is claimed once, and gone on with by the same recipe alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3convert.errors import DestinationExists, ResumeRefused, UsageError
from k3convert.training.out_folder import claim, differences
from k3convert.training.recipe import Recipe
from k3convert.training.recipe_reading import parse_recipe


def recipe(*settings: str) -> Recipe:
    return parse_recipe("description: d\ndata: {kind: synthetic}\n", settings)


def begin(out: Path) -> None:
    """A run of the plain recipe whose first step is done."""
    claim(out, recipe(), resume=False)
    (out / "metrics.jsonl").write_text("{}\n")


def test_a_folder_with_a_run_needs_resume(tmp_path: Path) -> None:
    begin(tmp_path / "out")

    with pytest.raises(DestinationExists, match="holds a run"):
        claim(tmp_path / "out", recipe(), resume=False)
    claim(tmp_path / "out", recipe(), resume=True)


def test_a_folder_whose_run_never_began_is_taken_anew_without_what_was_generated(tmp_path: Path) -> None:
    claim(tmp_path / "out", recipe("training.seed=7"), resume=False)
    (tmp_path / "out" / "base").mkdir()

    claim(tmp_path / "out", recipe(), resume=False)

    assert not (tmp_path / "out" / "base").exists()
    assert "seed: 7" not in (tmp_path / "out" / "recipe.yaml").read_text()


def test_resume_may_begin_anew_in_a_new_folder(tmp_path: Path) -> None:
    claim(tmp_path / "out", recipe(), resume=True)

    assert (tmp_path / "out" / "recipe.yaml").exists()


def test_a_folder_of_somebody_elses_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(DestinationExists, match="no run"):
        claim(tmp_path, recipe(), resume=True)


def test_a_folder_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        claim(tmp_path / "a" / "b", recipe(), resume=False)


def test_a_recipe_that_computes_other_numbers_is_refused_with_its_fields(tmp_path: Path) -> None:
    begin(tmp_path / "out")
    other = recipe("data.seed=1", "optimizer.learning_rate=1e-3", "training.freeze=[vision]")

    with pytest.raises(ResumeRefused) as caught:
        claim(tmp_path / "out", other, resume=True)

    assert [offender.partition(":")[0] for offender in caught.value.offenders] == [
        "data.seed",
        "optimizer.learning_rate",
        "training.freeze",
    ]


def test_layout_length_and_what_is_kept_may_change() -> None:
    now = recipe(
        "batch.micro_rows=2",
        "layout=fsdp=2",
        "training.steps=100",
        "saving.every=7",
        "expect.fall=0.5",
        "ops.moe_implementation=grouped_mm",
        "model.activation_checkpointing=false",
    )

    assert differences(recipe("batch.micro_rows=2"), now) == []
