"""stdout carries the result and nothing else; exit codes say what happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
Arguments = Callable[[Path, Path, Path], list[object]]

# each command on the small checkpoint, its DCP and a new folder
COMMANDS: dict[str, Arguments] = {
    "make-tiny": lambda hf, dcp, new: ["make-tiny", new, "--num-layers", 2, "--num-experts", 4],
    "inspect hf": lambda hf, dcp, new: ["inspect", hf],
    "inspect dcp": lambda hf, dcp, new: ["inspect", dcp],
    "hf-to-dcp": lambda hf, dcp, new: ["hf-to-dcp", hf, new],
    "hf-to-dcp plan": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--dry-run"],
    "dcp-to-hf": lambda hf, dcp, new: ["dcp-to-hf", dcp, new],
    "dcp-to-hf plan": lambda hf, dcp, new: ["dcp-to-hf", dcp, new, "--dry-run"],
    "verify": lambda hf, dcp, new: ["verify", dcp, "--against", hf],
    "diff": lambda hf, dcp, new: ["diff", hf, dcp],
}


@pytest.fixture(params=COMMANDS)
def arguments(request: pytest.FixtureRequest, small_source: Path, small_dcp: Path, tmp_path: Path) -> list[object]:
    return COMMANDS[request.param](small_source, small_dcp, tmp_path / "new")


def test_success_is_exit_0_with_a_result_on_stdout(command: Command, arguments: list[object]) -> None:
    outcome = command(*arguments)

    assert outcome.code == 0
    assert outcome.out.strip()
    assert "error" not in outcome.err


def test_json_is_exactly_one_document(command: Command, arguments: list[object]) -> None:
    outcome = command(*arguments, "--json")

    assert outcome.code == 0
    assert isinstance(outcome.document, dict)
    assert outcome.out.count("\n") == 1


def test_quiet_leaves_the_result_and_silences_the_rest(command: Command, arguments: list[object]) -> None:
    outcome = command(*arguments, "--quiet")

    assert outcome.code == 0
    assert outcome.out.strip()
    assert outcome.err == ""


def broken_config(hf: Path) -> None:
    (hf / "config.json").write_text("{")


def cut_shard(hf: Path) -> None:
    shard = next(iter(sorted(hf.glob("*.safetensors"))))
    os.truncate(shard, shard.stat().st_size - 64)


def escaping_index(hf: Path) -> None:
    index = hf / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] = dict.fromkeys(document["weight_map"], "../evil.safetensors")
    index.write_text(json.dumps(document))


def ghost_tensor(hf: Path) -> None:
    index = hf / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] |= {f"ghost{number}": "model-00001-of-000008.safetensors" for number in range(9)}
    index.write_text(json.dumps(document))


FAULTS = {
    "bad-config": broken_config,
    "bad-shard": cut_shard,
    "path-escape": escaping_index,
    "bad-index": ghost_tensor,
}


@pytest.mark.parametrize("code", FAULTS)
@pytest.mark.parametrize("name", ["hf-to-dcp", "inspect", "verify", "diff"])
def test_bad_input_is_exit_4_by_every_command(
    command: Command, small: Path, small_dcp: Path, tmp_path: Path, name: str, code: str
) -> None:
    FAULTS[code](small)
    rest: dict[str, list[object]] = {"hf-to-dcp": [tmp_path / "new"], "diff": [small_dcp]}

    plain = command(name, small, *rest.get(name, []))
    as_json = command(name, small, *rest.get(name, []), "--json")

    assert (plain.code, plain.out) == (4, "")
    assert plain.err.startswith(f"error[{code}]: ")
    assert as_json.code == 4
    assert as_json.document["error"]["code"] == code
    assert as_json.document["exit_code"] == 4
    assert not list(tmp_path.glob("new*"))


def test_the_first_offenders_are_shown_and_json_has_them_all(command: Command, small: Path, tmp_path: Path) -> None:
    ghost_tensor(small)

    plain = command("hf-to-dcp", small, tmp_path / "new")
    document = command("hf-to-dcp", small, tmp_path / "new", "--json").document

    assert plain.err.count("  - ghost") == 5
    assert "and 4 more" in plain.err
    assert document["error"]["num_offenders"] == len(document["error"]["offenders"]) == 9


def test_bad_metadata_is_exit_4_by_every_command(
    command: Command, small_dcp: Path, small_source: Path, tmp_path: Path
) -> None:
    dcp = Path(shutil.copytree(small_dcp, tmp_path / "dcp"))
    (dcp / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "marker") + b"'\ntR.")

    outcomes = [
        command(*arguments)
        for arguments in (
            ["inspect", dcp],
            ["verify", dcp],
            ["diff", dcp, small_source],
            ["dcp-to-hf", dcp, tmp_path / "new"],
            ["verify", small_source, "--against", dcp],
        )
    ]

    assert [outcome.code for outcome in outcomes] == [4] * 5
    assert all(outcome.err.startswith("error[bad-metadata]: ") for outcome in outcomes)
    assert not (tmp_path / "marker").exists()
    assert not list(tmp_path.glob("new*"))


USAGE: dict[str, Arguments] = {
    "no such command": lambda hf, dcp, new: ["convert", hf, new],
    "no such option": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--fast"],
    "a missing argument": lambda hf, dcp, new: ["hf-to-dcp", hf],
    "an argument too many": lambda hf, dcp, new: ["inspect", hf, dcp],
    "no folder": lambda hf, dcp, new: ["hf-to-dcp", new, dcp],
    "no dcp folder": lambda hf, dcp, new: ["dcp-to-hf", new, new],
    "no folder to inspect": lambda hf, dcp, new: ["inspect", new],
    "no folder to verify": lambda hf, dcp, new: ["verify", new],
    "no folder to diff": lambda hf, dcp, new: ["diff", hf, new],
    "no parent": lambda hf, dcp, new: ["hf-to-dcp", hf, new / "a" / "b"],
    "a taken destination": lambda hf, dcp, new: ["hf-to-dcp", hf, dcp],
    "a form that is none": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--experts", "fp8"],
    "a rule that is none": lambda hf, dcp, new: ["dcp-to-hf", dcp, new, "--scale-rule", "nearest"],
    "a size that is none": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--chunk-size", "many"],
    "a negative size": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--memory-limit", "-1"],
    "too little memory": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--memory-limit", "1K"],
    "a chunk of nothing": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--chunk-size", "0"],
    "no layers": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--num-layers", "0"],
    "more layers than there are": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--num-layers", "99"],
    "no workers": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--workers", "0"],
    "a part that is none": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--part", "one"],
    "a part from 1": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--part", "2/2"],
    "a part of nothing": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--part", "0/0"],
    "a part and the end": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--part", "0/2", "--finish"],
    "an end without a beginning": lambda hf, dcp, new: ["hf-to-dcp", hf, new, "--finish"],
    "an own source": lambda hf, dcp, new: ["hf-to-dcp", hf, hf, "--overwrite"],
    "a preset that is none": lambda hf, dcp, new: ["make-tiny", new, "--preset", "huge"],
    "a made folder that is there": lambda hf, dcp, new: ["make-tiny", hf],
    "a file as destination": lambda hf, dcp, new: ["hf-to-dcp", hf, hf / "config.json", "--overwrite"],
    "a base that is none": lambda hf, dcp, new: ["dcp-to-hf", dcp, new, "--like", new],
}


@pytest.mark.parametrize("wrong", USAGE)
def test_wrong_usage_is_exit_2_and_one_document_under_json(
    command: Command, small_source: Path, small_dcp: Path, tmp_path: Path, wrong: str
) -> None:
    arguments = USAGE[wrong](small_source, small_dcp, tmp_path / "new")

    plain = command(*arguments)
    as_json = command(*arguments, "--json")

    assert (plain.code, plain.out) == (2, ""), plain
    assert plain.err.startswith("error[")
    assert as_json.code == 2
    assert as_json.document["exit_code"] == 2
    assert not list(tmp_path.glob("new*"))


def test_a_command_line_without_a_command_shows_the_help(process: Command) -> None:
    outcome = process()

    assert outcome.code == 2
    assert "hf-to-dcp" in outcome.out + outcome.err


def test_what_the_system_refuses_is_exit_3(command: Command, small_source: Path) -> None:
    outcome = command("hf-to-dcp", small_source, "/proc/new")

    assert (outcome.code, outcome.out) == (3, "")
    assert "/proc" in outcome.err


def test_a_name_that_no_file_system_holds_is_exit_3(command: Command, small_source: Path, tmp_path: Path) -> None:
    outcome = command("hf-to-dcp", small_source, tmp_path / ("x" * 300))

    assert outcome.code == 3
    assert "too long" in outcome.err


def test_no_space_is_exit_3(
    command: Command, small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3convert.execution import conversion

    class Usage:
        free = 10_000

    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: Usage)

    document = command("hf-to-dcp", small_source, tmp_path / "new", "--json").document

    assert (document["error"]["code"], document["exit_code"]) == ("no-space", 3)
    assert "10000" in document["error"]["message"]
    assert not list(tmp_path.glob("new*"))


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3convert.planning import inspection

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("nobody expected this")

    monkeypatch.setattr(inspection, "inspect_checkpoint", fail)


@pytest.mark.usefixtures("bug")
def test_a_bug_is_exit_70_and_asks_for_a_report(command: Command, small_source: Path) -> None:
    plain = command("inspect", small_source)
    as_json = command("inspect", small_source, "--json")

    assert (plain.code, plain.out) == (70, "")
    assert "a bug in k3convert: ZeroDivisionError('nobody expected this')" in plain.err
    assert "Traceback" not in plain.err
    assert as_json.document["error"]["code"] == "internal"


@pytest.mark.usefixtures("bug")
def test_debug_adds_the_traceback_to_stderr(command: Command, small_source: Path) -> None:
    outcome = command("inspect", small_source, "--debug", "--json")

    assert outcome.document["exit_code"] == 70
    assert "Traceback" in outcome.err
    assert "in fail" in outcome.err


def test_debug_shows_where_bad_input_was_found(command: Command, small: Path, tmp_path: Path) -> None:
    broken_config(small)

    outcome = command("hf-to-dcp", small, tmp_path / "new", "--debug")

    assert outcome.code == 4
    assert "Traceback" in outcome.err


SLOW = """
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_exit_130_with_one_document(small_source: Path, tmp_path: Path, number: int) -> None:
    arguments = ["hf-to-dcp", str(small_source), str(tmp_path / "new"), "--workers", "1", "--json"]
    running = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    written, deadline = tmp_path / "new.partial" / "result", time.monotonic() + 60
    while not (written.is_dir() and any(written.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)

    running.send_signal(number)
    out, err = running.communicate(timeout=30)

    assert running.returncode == 130
    assert json.loads(out)["error"]["code"] == "interrupted"
    assert "repeat the command" in err
    assert not (tmp_path / "new").exists()


def test_a_reader_that_leaves_is_no_bug(small_source: Path) -> None:
    shell = f"{sys.executable} -m k3convert inspect {small_source} --json | head -c 1"

    done = subprocess.run(["bash", "-c", f"set -o pipefail; {shell}"], capture_output=True, text=True, check=False)

    assert "bug" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_is_no_text_can_be_reported(process: Command, small: Path, tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    shutil.move(small, folder)

    plain = process("inspect", folder, PYTHONIOENCODING="ascii")
    as_json = process("inspect", folder, "--json", PYTHONIOENCODING="ascii")

    assert (plain.code, as_json.code) == (0, 0), plain.err
    assert as_json.document["ok"] is True


@pytest.mark.parametrize(("name", "at"), [("verify", 40_000), ("verify", 45), ("diff", 40_000)])
def test_a_flipped_bit_is_exit_1(
    command: Command, small_source: Path, small_dcp: Path, tmp_path: Path, name: str, at: int
) -> None:
    """Byte 40,000 is a weight; byte 45 is framing, which holds no value and concerns ``verify`` alone."""
    dcp = Path(shutil.copytree(small_dcp, tmp_path / "dcp"))
    data = bytearray((dcp / "__0_1.distcp").read_bytes())
    data[at] ^= 1
    (dcp / "__0_1.distcp").write_bytes(data)

    outcome = command(name, dcp, *([small_source] if name == "diff" else []), "--json")

    assert (outcome.code, outcome.err) == (1, "")
    assert not outcome.document["ok" if name == "verify" else "equal"]
    assert len(outcome.document["faults" if name == "verify" else "differences"]) == 1


def test_verify_tells_a_changed_source_from_its_dcp(command: Command, small: Path, small_dcp: Path) -> None:
    shard = small / "model-00003-of-000008.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)

    outcome = command("verify", small_dcp, "--against", small)

    assert outcome.code == 1
    assert "1 DIFFERENCE\n" in outcome.out


def test_diff_names_the_tensor_row_and_column(command: Command, small: Path, small_source: Path) -> None:
    shard = small / "model-00003-of-000008.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)

    outcome = command("diff", small_source, small, "--json")

    difference = outcome.document["differences"][0]
    assert outcome.code == 1
    assert difference["name"].endswith("experts.3.w3.weight")
    assert 1 <= difference["num_different"] <= 32
    assert "the first at row" in difference["detail"]


@pytest.mark.parametrize("job", ["hf-to-dcp", "dcp-to-hf"])
def test_a_dry_run_writes_nothing_and_reports_space(
    command: Command, small_source: Path, small_dcp: Path, tmp_path: Path, job: str
) -> None:
    source = small_source if job == "hf-to-dcp" else small_dcp

    document = command(job, source, tmp_path / "new", "--dry-run", "--json").document
    text = command(job, source, tmp_path / "new", "--dry-run")
    done = command(job, source, tmp_path / "done", "--json").document

    assert document["bytes_needed"] >= document["bytes_to_write"] == done["bytes_written"]
    assert document["bytes_free"] > 0
    assert document["counts"] == done["counts"]
    assert "of space" in text.out
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_a_dry_run_finds_what_a_run_would_refuse(command: Command, small: Path, tmp_path: Path) -> None:
    cut_shard(small)

    assert command("hf-to-dcp", small, tmp_path / "new", "--dry-run").code == 4


def test_progress_and_notes_go_to_stderr(command: Command, small: Path, tmp_path: Path) -> None:
    (small / "model.safetensors").write_bytes(b"stray")

    outcome = command("hf-to-dcp", small, tmp_path / "new")
    quiet = command("hf-to-dcp", small, tmp_path / "new", "--overwrite", "--quiet")

    assert "note: model.safetensors is not part of the checkpoint" in outcome.err
    assert "note:" not in outcome.out
    assert (quiet.code, quiet.err) == (0, "")


def test_a_partial_result_that_another_process_writes_is_not_discarded(
    command: Command, small_source: Path, tmp_path: Path
) -> None:
    arguments = ["hf-to-dcp", str(small_source), str(tmp_path / "new"), "--workers", "1"]
    running = subprocess.Popen([sys.executable, "-c", SLOW, *arguments], stdout=subprocess.DEVNULL)
    written, deadline = tmp_path / "new.partial" / "result", time.monotonic() + 60
    while not (written.is_dir() and any(written.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)

    outcome = command(*arguments, "--no-resume")
    running.send_signal(signal.SIGTERM)
    running.wait(timeout=30)

    assert outcome.code == 2
    assert "another process is writing" in outcome.err
