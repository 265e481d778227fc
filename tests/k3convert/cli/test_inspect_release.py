"""``inspect --index-only`` on the config and index of the released checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

NUM_TENSORS, NUM_PAIRS = 497_220, 247_296
PACKED_VALUES, PLAIN_VALUES = 2_722_740_830_208, 57_191_006_976
TOTAL_BYTES = 1_560_860_324_864


@pytest.mark.fixtures
def test_the_release_has_its_published_counts(command: Command, reference_fixtures: Path) -> None:
    outcome = command("inspect", reference_fixtures / "kimi_k3_release", "--index-only", "--json")

    document = outcome.document
    assert outcome.code == 0
    assert document["census"]["ok"]
    assert document["num_tensors"] == document["census"]["expected"] == NUM_TENSORS
    assert document["packed_pairs"] == NUM_PAIRS
    assert document["packed_values"] == PACKED_VALUES
    assert document["plain_values"] == PLAIN_VALUES
    assert document["total_bytes"] == TOTAL_BYTES
    assert document["num_files"] == 96
    assert not any("total_size" in note for note in document["notes"])


def test_an_index_alone_needs_no_shard(command: Command, small_source: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copyfile(small_source / name, tmp_path / name)

    by_folder = command("inspect", tmp_path, "--index-only", "--json")
    by_file = command("inspect", tmp_path / "model.safetensors.index.json", "--json")
    with_shards = command("inspect", tmp_path, "--json")

    assert (by_folder.code, by_file.code, with_shards.code) == (0, 0, 4)
    assert by_folder.document["num_tensors"] == by_file.document["num_tensors"]
    assert with_shards.document["error"]["code"] == "incomplete-checkpoint"


def test_a_census_that_differs_is_exit_1_with_every_name(
    command: Command, small: Path, edit_tensors: Callable[..., None]
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        like = tensors.pop("language_model.model.norm.weight")
        tensors["language_model.model.final_norm.weight"] = like

    edit_tensors(small, change)

    plain = command("inspect", small)
    document = command("inspect", small, "--json").document

    assert plain.code == 1
    assert "census: DIFFERENT" in plain.out
    assert document["census"]["missing"] == {"count": 1, "names": ["language_model.model.norm.weight"]}
    assert document["census"]["unexpected"] == {"count": 1, "names": ["language_model.model.final_norm.weight"]}


@pytest.mark.parametrize("damage", ["not gzip", "cut gzip", "bad gzip"])
def test_a_damaged_gz_index_is_exit_4(command: Command, small_source: Path, tmp_path: Path, damage: str) -> None:
    import gzip

    shutil.copyfile(small_source / "config.json", tmp_path / "config.json")
    packed = gzip.compress((small_source / "model.safetensors.index.json").read_bytes())
    data = {"not gzip": b"{}", "cut gzip": packed[:-20], "bad gzip": packed[:50] + b"\0" * 40 + packed[90:]}[damage]
    (tmp_path / "model.safetensors.index.json.gz").write_bytes(data)

    outcome = command("inspect", tmp_path, "--index-only")

    assert outcome.code == 4
    assert "model.safetensors.index.json.gz" in outcome.err
