"""How a generated checkpoint appears, and when it is refused."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from k3convert.errors import DestinationExists, NoSpace, UsageError
from k3convert.synthesis import make_checkpoint
from k3convert.synthesis.presets import config_dict
from k3convert.synthesis.shards import measure
from k3model.census import tally
from k3model.config import KimiK3Config

RELEASED_PAYLOAD_BYTES = 1_560_860_324_864
RELEASED_FILE_BYTES = 1_560_936_091_448  # the published sum of the 96 files
MAX_RESIDENT_BYTES = 300_000_000
# Prints the peak of its own memory in KiB; getrusage would count that of the process it was forked from.
PROGRAM = """
import re, sys
from pathlib import Path
from k3convert.synthesis import make_checkpoint
make_checkpoint(Path(sys.argv[1]), preset=sys.argv[2], sparse="--sparse" in sys.argv)
print(*re.findall(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text()))
"""


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_the_summary_says_what_was_written(tmp_path: Path) -> None:
    summary = make_checkpoint(tmp_path / "made", preset="tiny", seed=3)

    assert (summary.num_tensors, summary.num_shards, summary.total_bytes) == (1510, 16, 7_262_272)
    assert summary.file_bytes == sum(path.stat().st_size for path in (tmp_path / "made").glob("*.safetensors"))
    assert summary.document()["seed"] == 3


def test_layers_and_experts_can_be_chosen(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "made", preset="tiny", num_layers=5, num_experts=2)

    text = json.loads((tmp_path / "made" / "config.json").read_text())["text_config"]
    assert (text["num_hidden_layers"], text["num_experts"], text["num_experts_per_token"]) == (5, 2, 2)
    assert text["linear_attn_config"]["full_attn_layers"] == [4, 5]
    assert text["linear_attn_config"]["kda_layers"] == [1, 2, 3]


@pytest.mark.parametrize("num_layers", [1, 2, 14])
def test_any_number_of_layers_makes_a_network(tmp_path: Path, num_layers: int) -> None:
    summary = make_checkpoint(tmp_path / "made", preset="tiny", num_layers=num_layers, num_experts=1)

    assert summary.num_shards == num_layers + 3


def test_progress_goes_up_to_the_total(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    make_checkpoint(
        tmp_path / "made", preset="tiny", num_layers=2, on_progress=lambda done, total: told.append((done, total))
    )

    done = [step for step, _ in told]
    assert done == sorted(done)
    assert told[-1][0] == told[-1][1]


def test_an_existing_destination_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "precious").write_text("kept")

    with pytest.raises(DestinationExists, match="made exists"):
        make_checkpoint(tmp_path / "made", preset="tiny")

    assert (tmp_path / "made" / "precious").read_text() == "kept"


def test_a_missing_parent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        make_checkpoint(tmp_path / "none" / "made", preset="tiny")


def test_an_unknown_preset_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no preset 'huge'; there are: tiny, many, large, release"):
        make_checkpoint(tmp_path / "made", preset="huge")


def test_numbers_that_make_no_network_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no K3 network has these numbers"):
        make_checkpoint(tmp_path / "made", preset="tiny", num_layers=0)


def test_too_little_space_is_refused_with_both_numbers_before_anything_is_written(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert free < RELEASED_PAYLOAD_BYTES

    with pytest.raises(NoSpace, match=rf"needs {RELEASED_PAYLOAD_BYTES} bytes, .* has \d+ free") as refused:
        make_checkpoint(tmp_path / "made", preset="release")

    assert refused.value.hint is not None
    assert "--sparse" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_sparse_needs_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = namedtuple("Usage", "total used free")(1, 1, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: full)

    summary = make_checkpoint(tmp_path / "made", preset="tiny", num_layers=2, sparse=True)

    assert summary.sparse


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("k3convert.synthesis.generated_checkpoint.write_assets", fail)

    with pytest.raises(type(error)):
        make_checkpoint(tmp_path / "made", preset="tiny", num_layers=1)

    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_runs_full_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("k3convert.synthesis.generated_checkpoint.write_index", fail)

    with pytest.raises(NoSpace, match="ran full"):
        make_checkpoint(tmp_path / "made", preset="tiny", num_layers=1)

    assert list(tmp_path.iterdir()) == []


def test_a_sparse_checkpoint_has_the_same_headers_and_holes_for_data(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "sparse", preset="tiny", sparse=True)

    for path in sorted(tiny.glob("*.safetensors")):
        whole, sparse = path.read_bytes(), (tmp_path / "sparse" / path.name).read_bytes()
        length = 8 + int.from_bytes(whole[:8], "little")
        assert sparse[:length] == whole[:length]
        assert sparse[length:] == bytes(len(whole) - length)
    assert used_bytes(tmp_path / "sparse") < used_bytes(tiny) / 8


@pytest.mark.parametrize(
    ("preset", "num_tensors", "total_bytes"),
    [
        ("many", range(43_000, 43_500), range(2_150_000_000, 2_250_000_000)),
        ("large", range(800, 1_000), range(2_350_000_000, 2_500_000_000)),
        ("release", range(497_220, 497_221), range(RELEASED_PAYLOAD_BYTES, RELEASED_PAYLOAD_BYTES + 1)),
    ],
)
def test_presets_have_their_sizes(preset: str, num_tensors: range, total_bytes: range) -> None:
    config = KimiK3Config.from_dict(config_dict(preset))

    found = tally(config.census())

    assert found.num_tensors in num_tensors
    assert found.total_bytes in total_bytes
    assert measure(config).total_bytes == found.total_bytes


def test_large_has_experts_of_the_true_size() -> None:
    config = KimiK3Config.from_dict(config_dict("large"))

    shapes = {spec.name.rsplit(".", 2)[1]: spec.shapes[0] for spec in config.census() if spec.name.endswith("_packed")}

    assert shapes == {"w1": (3072, 1792), "w3": (3072, 1792), "w2": (3584, 1536)}


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "options"), [("large", ()), ("release", ("--sparse",))])
def test_memory_stays_small_whatever_the_size(tmp_path: Path, preset: str, options: tuple[str, ...]) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "made"), preset, *options],
        check=True,
        capture_output=True,
        text=True,
    )

    shutil.rmtree(tmp_path / "made")
    assert int(finished.stdout) * 1024 < MAX_RESIDENT_BYTES


@pytest.mark.slow
def test_the_sparse_release_has_the_released_names_and_takes_little_space(
    tmp_path: Path, reference_fixtures: Path
) -> None:
    import gzip

    summary = make_checkpoint(tmp_path / "release", preset="release", sparse=True)

    made = json.loads((tmp_path / "release" / "model.safetensors.index.json").read_text())
    with gzip.open(reference_fixtures / "kimi_k3_release" / "model.safetensors.index.json.gz") as file:
        released = json.load(file)
    assert made == released
    assert summary.file_bytes == RELEASED_FILE_BYTES
    assert used_bytes(tmp_path / "release") < 200_000_000
    shutil.rmtree(tmp_path / "release")
