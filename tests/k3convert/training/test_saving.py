"""Saving and resuming: bit by bit, under kills, under other layouts, and readable as a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from k3convert.cli.app import run as k3convert
from k3convert.errors import UsageError
from k3convert.loading import load_model
from k3convert.ranks import RanksFailed
from k3convert.training.checkpoints.step_folders import MARKER, step_path

from .conftest import Ranks

STEPS = "training.steps=4"


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def finished(rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, saved at the second and the fourth; read it, never write to it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    rank("run", STEPS, out=str(out))
    return out


def without_last_step(finished: Path, tmp_path: Path) -> Path:
    """The run as a kill after its third step would leave it."""
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(step_path(out, 4))
    return out


def test_a_run_tries_the_step_after_resuming_bit_by_bit(rank: Ranks, tmp_path: Path) -> None:
    check = rank("run", "training.steps=1", out=str(tmp_path / "run"))["outcome"]["resume_check"]

    assert check["step"] == 2
    assert check["is_bitwise"]
    assert check["losses"][0] == check["losses"][1]


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(rank: Ranks, finished: Path, tmp_path: Path) -> None:
    out = without_last_step(finished, tmp_path)

    found = rank("run", STEPS, out=str(out), resume=True)

    assert found["outcome"]["resumed_from"] == 2
    assert losses(out) == losses(finished)
    want, resumed = (rank("stored", folder=str(step_path(folder, 4))) for folder in (finished, out))
    assert want.keys() == resumed.keys()
    assert any(name.endswith("exp_avg_sq") for name in want)
    assert all(torch.equal(want[name], resumed[name]) for name in want)


def test_a_kill_in_a_save_leaves_the_step_before_and_the_next_run_says_so(
    rank: Ranks, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(RanksFailed, match="failed"):
        rank("run_and_die_in_a_save", STEPS, out=str(out), step=4)

    found = rank("run", STEPS, out=str(out), resume=True)

    assert found["said"][:2] == ["passed over step-4.saving: its save was cut short", "going on from step 2"]
    assert losses(out) == losses(finished)


def test_a_step_without_its_marker_is_passed_over(rank: Ranks, finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    (step_path(out, 4) / MARKER).unlink()

    found = rank("run", STEPS, out=str(out), resume=True)

    assert found["said"][0].startswith("passed over step-4: it has no complete.json")
    assert found["outcome"]["resumed_from"] == 2


def test_resuming_without_a_step_starts_anew_and_says_so(rank: Ranks, tmp_path: Path) -> None:
    found = rank("run", "training.steps=1", out=str(tmp_path / "run"), resume=True)

    assert found["said"][0].startswith("no complete step")
    assert found["outcome"]["resumed_from"] == 0


def test_a_run_beyond_the_last_step_is_refused(rank: Ranks, finished: Path) -> None:
    with pytest.raises(UsageError, match="at step 4 already, beyond the 3"):
        rank("run", "training.steps=3", out=str(finished), resume=True)


def test_a_step_saved_in_the_background_is_the_state_at_the_call(rank: Ranks, tmp_path: Path) -> None:
    assert rank("save_while_training", out=str(tmp_path)) == {"changed": True, "is_same": True}


def test_generators_are_saved_and_come_back(rank: Ranks, tmp_path: Path) -> None:
    assert rank("generators_come_back", out=str(tmp_path))


def test_a_saved_step_becomes_a_hugging_face_folder_with_the_trained_weights(
    rank: Ranks, finished: Path, tmp_path: Path
) -> None:
    step, base = step_path(finished, 4), rank.checkpoint

    code = k3convert(
        ["dcp-to-hf", str(step), str(tmp_path / "hf"), "--like", str(base), "--experts", "bf16", "--quiet"]
    )

    assert code == 0
    stored: dict[str, torch.Tensor] = rank("stored", folder=str(step))
    found = load_model(tmp_path / "hf", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(found[name], stored[f"model.{name}"].to(found[name].dtype)) for name in found)
    before = load_model(base, dtype=torch.bfloat16).state_dict()
    assert not torch.equal(found["language_model.lm_head.weight"], before["language_model.lm_head.weight"])


@pytest.mark.parametrize("layout", ["sp=2,ep=2", "pp=2"])
def test_a_layout_saves_resumes_and_repeats_bit_by_bit(
    two_ranks: Ranks, finished: Path, tmp_path: Path, layout: str
) -> None:
    out = tmp_path / "run"
    settings = (STEPS, f"layout={layout}")
    check: dict[str, Any] = two_ranks("run", *settings, out=str(out))["outcome"]["resume_check"]
    whole = losses(out)
    shutil.rmtree(step_path(out, 4))

    resumed = two_ranks("run", *settings, out=str(out), resume=True)

    assert check["is_bitwise"]
    assert resumed["outcome"]["resumed_from"] == 2
    assert losses(out) == whole
    assert whole[0] == losses(finished)[0]


def test_a_step_of_one_layout_is_gone_on_with_under_another(two_ranks: Ranks, finished: Path, tmp_path: Path) -> None:
    out = without_last_step(finished, tmp_path)

    found = two_ranks("run", STEPS, "layout=fsdp=2", out=str(out), resume=True)

    assert found["outcome"]["resumed_from"] == 2
    # the forward pass has the same bits; what the third step's gradients round differently shows in the fourth loss
    assert losses(out)[2] == losses(finished)[2]
    assert losses(out)[3] == pytest.approx(losses(finished)[3], rel=1e-4)
