"""The two commands: what they print where, their exit codes, and what they leave on disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3convert.cli.app import run
from k3convert.errors import ExitCode

from .conftest import RECIPE, Ranks, write_lines


@pytest.fixture
def recipe_file(tmp_path: Path, slight_source: Path) -> Path:
    path = tmp_path / "few.yaml"
    path.write_text(RECIPE.replace("model: {", f"model: {{checkpoint: {slight_source}, "))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, slight_source: Path) -> Any:
    """One run with everything on: its exit code, streams and folder."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "few.yaml").write_text(RECIPE)
    arguments = ["smoke-train", "few.yaml", "--checkpoint", str(slight_source), "--steps", "3", "--profile", "--json"]
    options = ["--set", "ops.moe_implementation=grouped_mm", "--set", "optimizer.learning_rate=1e-2"]
    command = [sys.executable, "-m", "k3convert", *arguments, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    return done, folder / "smoke-train-few"


def test_the_result_is_one_document_on_stdout_and_steps_are_lines_on_stderr(trained: Any) -> None:
    done, _ = trained

    document = json.loads(done.stdout)
    lines = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert done.returncode == 0, done.stderr
    assert document["verdict"] == "ok"
    assert [check["name"] for check in document["checks"]][-1] == "kernels"
    assert {check["name"]: check["result"] for check in document["checks"]}["resume"] == "passed"
    assert len(lines) == 3
    assert re.match(r"step 1/3  loss 6\.\d{4}  norm ", lines[0])


def test_the_folder_holds_metrics_verdict_report_trace_and_checkpoints(trained: Any) -> None:
    done, out = trained

    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((out / "verdict.json").read_text()) == json.loads(done.stdout)
    assert "moe_experts/situ/grouped_mm" in (out / "trace.json").read_text()
    page = (out / "report.html").read_text().replace("<wbr>", "")
    assert "<svg" in page
    assert all(word in page for word in ("Loss", "Gradient norm", "Memory", "moe_experts/situ/grouped_mm", "layer 3"))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-2", "step-3"]


def test_a_kernel_that_was_chosen_is_seen_in_the_profile(trained: Any) -> None:
    (found,) = json.loads(trained[0].stdout)["runs"]

    by_name = {op["name"]: op for op in found["kernels"]["ops"]}
    assert any("grouped_mm" in kernel for kernel in by_name["moe_experts/situ/grouped_mm"]["kernels"])
    assert found["kernels"]["faults"] == []


def test_a_run_that_is_there_is_not_overwritten(trained: Any, recipe_file: Path, capsys: Any) -> None:
    code = run(["smoke-train", str(recipe_file), "--out", str(trained[1])])

    assert code == ExitCode.USAGE
    assert "--resume goes on with it" in capsys.readouterr().err


def test_another_recipe_does_not_go_on_with_a_run(trained: Any, recipe_file: Path, capsys: Any) -> None:
    code = run(["smoke-train", str(recipe_file), "--out", str(trained[1]), "--resume"])

    assert code == ExitCode.USAGE
    assert "optimizer.learning_rate: 0.01 there, 0.003 now" in capsys.readouterr().err


def test_implementations_are_compared_and_a_verdict_of_no_exits_with_one(
    recipe_file: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "compared"
    names = "eager,moe=grouped_mm+attn=sdpa"
    settings = ["--set", "saving.every=0", "--set", "expect.fall=0.9", "--set", "expect.envelope=1e-3"]

    code = run(["smoke-train", str(recipe_file), "--steps", "4", "--out", str(out), *settings, "--compare-impl", names])

    text = capsys.readouterr().out
    assert code == ExitCode.VERDICT_NO
    assert re.search(r"failed +eager: loss falls", text)
    assert re.search(r"not run +eager: resume", text)
    assert re.search(r"passed +moe=grouped_mm\+attn=sdpa follows eager", text)
    assert (out / "eager" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--layout", "sp=3"], ExitCode.USAGE, "sp=3 does not divide the 4 heads"),
        (["--layout", "tp=2"], ExitCode.BAD_INPUT, "'tp=2'"),
        (["--set", "device=cuda"], ExitCode.NOT_POSSIBLE_HERE, "cuda"),
        (["--set", "ops.chunk_kda_implementation=fla"], ExitCode.NOT_POSSIBLE_HERE, "chunk_kda_implementation=fla"),
        (["--checkpoint", "/nowhere"], ExitCode.USAGE, "/nowhere"),
        (["--set", "data={kind: text}"], ExitCode.USAGE, "needs a file"),
        (["--set", "model.checkpoint=null"], ExitCode.USAGE, "names no checkpoint"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_reason(
    recipe_file: Path, tmp_path: Path, capsys: Any, arguments: list[str], code: ExitCode, message: str
) -> None:
    found = run(["smoke-train", str(recipe_file), "--out", str(tmp_path / "out"), *arguments])

    assert (found, message in capsys.readouterr().err) == (code, True)


def test_captions_become_conversations_that_train_with_their_images(
    rank: Ranks, pictures: Path, tmp_path: Path, capsys: Any
) -> None:
    images = [{"id": number, "file_name": f"{name}.png"} for number, name in enumerate("abc")]
    captions = [{"id": number, "image_id": number, "caption": "a red box"} for number in range(3)]
    (tmp_path / "captions.json").write_text(json.dumps({"images": images, "annotations": captions}))
    lines = tmp_path / "lines.jsonl"

    made = run(["coco-to-conversations", str(tmp_path / "captions.json"), str(pictures), str(lines)])
    settings = [f"data={{kind: conversations, path: {lines}, images: {pictures}}}", "training.freeze=[]"]
    found = rank("steps", *settings, "batch={sequence_length: 96, global_rows: 2, micro_rows: 1}", num_steps=1)

    assert made == 0
    assert "3 conversations on 3 images" in capsys.readouterr().out
    assert found["metrics"][0]["group_norms"]["vision"] > 0


def test_hellaswag_trains_on_packed_rows(rank: Ranks, tmp_path: Path) -> None:
    record = {"ctx": "the dog and", "endings": ["the end", "a message to the user"], "label": "1"}
    path = write_lines(tmp_path / "text.jsonl", [record] * 9)
    settings = [f"data={{kind: text, path: {path}, loss_on: ending}}", "batch.sequence_length=64"]

    first, second = rank("steps", *settings, num_steps=2)["metrics"]

    assert 0 < first["num_labels"] < first["num_tokens"]
    assert second["loss"] < first["loss"]


@pytest.mark.slow
def test_torchrun_trains_on_its_own_ranks_and_only_the_first_speaks(recipe_file: Path, tmp_path: Path) -> None:
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    command = [torchrun, "--standalone", "--nproc-per-node=2", "-m", "k3convert", "smoke-train", str(recipe_file)]
    options = ["--steps", "2", "--layout", "fsdp=2", "--out", str(tmp_path / "run"), "--json"]

    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=280, check=False, env={**os.environ}
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "ok"
    assert done.stderr.count("step 2/2") == 1
