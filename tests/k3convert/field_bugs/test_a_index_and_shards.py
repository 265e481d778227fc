"""Field reports A6, A11, A14, A19 and A22: an index and its shards must say the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3convert.checkpoint.hf_folder import open_hf_folder
from k3convert.checkpoint.safetensors_header import build_header, read_header
from k3convert.errors import BadIndex, BadShard, IncompleteCheckpoint

Convert = Callable[..., Any]
EditJson = Callable[[Path, Callable[[dict[str, Any]], None]], None]
Refused = Callable[..., str]

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-000008.safetensors"
OTHER_SHARD = "model-00003-of-000008.safetensors"
NORM = "language_model.model.norm.weight"


def weight_map(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def add_to_shard(path: Path, name: str, data: bytes) -> None:
    """Append one U8 tensor to a shard."""
    header = read_header(path)
    payload = path.read_bytes()[len(header.raw) :]
    lines = [(entry.name, entry.dtype, entry.shape) for entry in header.entries]
    raw, _ = build_header([*lines, (name, "U8", (len(data),))], metadata=header.metadata)
    path.write_bytes(raw + payload + data)


def test_a7_every_shard_is_measured_before_a_tensor_is_read(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    os.truncate(small / SHARD, (small / SHARD).stat().st_size - 64)

    message = refused_by_hf_to_dcp(small, BadShard)

    assert SHARD in message
    assert "truncated" in message


def test_a7_every_bad_shard_is_listed(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    os.truncate(small / SHARD, (small / SHARD).stat().st_size - 64)
    (small / OTHER_SHARD).write_bytes(b"<html>not found</html>")

    message = refused_by_hf_to_dcp(small, BadShard)

    assert "2 of 8 shards" in message
    assert SHARD in message
    assert "HTML" in message


def test_a11_a_stray_file_beside_the_indexed_shards_is_left_out_and_named(
    small: Path, tmp_path: Path, small_source: Path, to_dcp: Convert, to_hf: Convert
) -> None:
    stray = bytearray((small / SHARD).read_bytes())
    stray[-64:] = bytes(64)
    (small / "model.safetensors").write_bytes(stray)

    report = to_dcp(small, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert "model.safetensors is not part of the checkpoint and is left out" in report.notes
    assert (tmp_path / "hf" / SHARD).read_bytes() == (small_source / SHARD).read_bytes()
    assert not (tmp_path / "hf" / "model.safetensors").exists()


def test_a14_an_index_that_names_a_tied_head_no_shard_holds_is_refused(
    small: Path, edit_tensors: Callable[..., None], edit_json: EditJson, refused_by_hf_to_dcp: Refused
) -> None:
    edit_tensors(small, lambda tensors: tensors.pop("language_model.lm_head.weight"))
    edit_json(small / "config.json", tie_embeddings)
    last = max(weight_map(small).values())
    edit_json(small / INDEX, lambda index: index["weight_map"].update({"language_model.lm_head.weight": last}))

    message = refused_by_hf_to_dcp(small, BadIndex)

    assert f"language_model.lm_head.weight should be in {last} but is not" in message


def test_a14_what_is_written_lists_exactly_the_tensors_it_holds(
    small: Path, tmp_path: Path, edit_tensors: Callable[..., None], edit_json: EditJson, to_dcp: Convert, to_hf: Convert
) -> None:
    edit_tensors(small, lambda tensors: tensors.pop("language_model.lm_head.weight"))
    edit_json(small / "config.json", tie_embeddings)
    to_dcp(small, tmp_path / "dcp")

    to_hf(tmp_path / "dcp", tmp_path / "hf", max_shard_bytes=100_000)

    written = open_hf_folder(tmp_path / "hf")
    names = [entry.name for _, entry in written.entries()]
    assert written.index is not None
    assert sorted(names) == sorted(written.index.weight_map) == sorted(weight_map(small))
    assert "language_model.lm_head.weight" not in names
    assert written.index.total_size == written.payload_bytes


def tie_embeddings(config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = True
    config["text_config"]["tie_word_embeddings"] = True


@pytest.mark.parametrize("total_size", [1, None, "many", ...])
def test_a19_totals_are_counted_anew(
    small: Path, tmp_path: Path, edit_json: EditJson, to_dcp: Convert, total_size: object
) -> None:
    def change(index: dict[str, Any]) -> None:
        index["metadata"] = {} if total_size is ... else {"total_size": total_size, "tensor_count": 3}

    payload = open_hf_folder(small).payload_bytes
    edit_json(small / INDEX, change)

    report = to_dcp(small, tmp_path / "dcp")

    assert report.counts["source_bytes"] == payload
    assert report.counts["tensors"] == len(weight_map(small))
    noted = any(f"total_size 1, the shards hold {payload}" in note for note in report.notes)
    assert noted == (total_size == 1)


def test_a19_there_is_no_limit_to_the_number_of_experts(tmp_path: Path, to_dcp: Convert, to_hf: Convert) -> None:
    from k3convert.synthesis import make_checkpoint

    make_checkpoint(tmp_path / "wide", preset="tiny", num_layers=2, num_experts=896, seed=0, sparse=False)

    report = to_dcp(tmp_path / "wide", tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert report.counts["tensors"] > 896 * 6
    for path in (tmp_path / "wide").iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a19_tensors_that_the_config_does_not_know_are_named(
    small: Path, edit_json: EditJson, refused_by_hf_to_dcp: Refused
) -> None:
    edit_json(small / "config.json", lambda config: config["text_config"].update(attn_res_block_size=None))

    message = refused_by_hf_to_dcp(small)

    unread = [name for name in weight_map(small) if "_res_" in name or "output_attn_res" in name]
    assert f"{len(unread)} unexpected" in message
    assert all(f"unexpected: {name}" in message for name in unread)


def test_a22_a_tensor_of_the_index_that_its_shard_lacks(
    small: Path, edit_json: EditJson, refused_by_hf_to_dcp: Refused
) -> None:
    edit_json(small / INDEX, lambda index: index["weight_map"].update(ghost=SHARD))

    assert f"ghost should be in {SHARD} but is not" in refused_by_hf_to_dcp(small, BadIndex)


def test_a22_a_tensor_of_a_shard_that_the_index_lacks(
    small: Path, edit_json: EditJson, refused_by_hf_to_dcp: Refused
) -> None:
    shard = weight_map(small)[NORM]
    edit_json(small / INDEX, lambda index: index["weight_map"].pop(NORM))

    assert f"{NORM} is in {shard} but not in the index" in refused_by_hf_to_dcp(small, BadIndex)


def test_a22_a_tensor_in_another_shard_than_the_index_says(
    small: Path, edit_json: EditJson, refused_by_hf_to_dcp: Refused
) -> None:
    shard = weight_map(small)[NORM]
    edit_json(small / INDEX, lambda index: index["weight_map"].update({NORM: SHARD}))

    assert f"{NORM} is in {shard}, the index says {SHARD}" in refused_by_hf_to_dcp(small, BadIndex)


def test_a22_a_tensor_in_two_shards(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    shard = weight_map(small)[NORM]
    add_to_shard(small / SHARD, NORM, b"\0" * 8)

    assert f"{NORM} is in {SHARD} and in {shard}" in refused_by_hf_to_dcp(small, BadIndex)


def test_a22_shards_that_the_index_names_but_that_are_not_there(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    (small / SHARD).unlink()
    (small / OTHER_SHARD).unlink()

    message = refused_by_hf_to_dcp(small, IncompleteCheckpoint)

    assert "2 of 8 shards" in message
    assert f"{SHARD} is missing" in message
    assert f"{OTHER_SHARD} is missing" in message


def test_a22_a_name_twice_in_the_weight_map(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    text = (small / INDEX).read_text()
    (small / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{NORM}": "{SHARD}",', 1))

    message = refused_by_hf_to_dcp(small, BadIndex)

    assert f"duplicate key '{NORM}'" in message


def test_a22_every_disagreement_is_counted(small: Path, edit_json: EditJson, refused_by_hf_to_dcp: Refused) -> None:
    edit_json(small / INDEX, lambda index: index["weight_map"].update({f"ghost{n}": SHARD for n in range(12)}))

    message = refused_by_hf_to_dcp(small, BadIndex)

    assert "disagree on 12 of" in message
    assert all(f"ghost{number} should be" in message for number in range(12))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": null}', "[" * 100_000]
)
def test_a22_an_index_that_is_none_is_refused(small: Path, refused_by_hf_to_dcp: Refused, text: str) -> None:
    (small / INDEX).write_text(text)

    assert INDEX in refused_by_hf_to_dcp(small, BadIndex)


def test_a22_shards_without_an_index_are_not_globbed(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    (small / INDEX).unlink()

    message = refused_by_hf_to_dcp(small, IncompleteCheckpoint)

    assert "neither" in message
    assert "8 safetensors files" in message


def test_a22_a_shard_in_a_folder_below_is_refused_with_both_names(
    small: Path, edit_json: EditJson, refused_by_hf_to_dcp: Refused
) -> None:
    (small / "part").mkdir()
    shutil.move(small / SHARD, small / "part" / SHARD)

    def change(index: dict[str, Any]) -> None:
        index["weight_map"] = {
            name: f"part/{shard}" if shard == SHARD else shard for name, shard in index["weight_map"].items()
        }

    edit_json(small / INDEX, change)

    assert f"part/{SHARD}" in refused_by_hf_to_dcp(small, BadIndex)


@pytest.mark.parametrize("dtype", [["U8"], {"a": 1}, None, 8])
def test_a4_a_dtype_that_is_no_text_is_refused(small: Path, refused_by_hf_to_dcp: Refused, dtype: object) -> None:
    text = json.dumps({"w": {"dtype": dtype, "shape": [1], "data_offsets": [0, 1]}}).encode()
    (small / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + b"\0")

    assert "w: unknown dtype" in refused_by_hf_to_dcp(small, BadShard)


def test_a4_a_tensor_name_that_no_file_can_hold_is_refused(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    text = b'{"w\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (small / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + b"\0")

    assert "'w\\ud800': the name is not UTF-8 text" in refused_by_hf_to_dcp(small, BadShard)


def test_a6_an_empty_tensor_is_judged_by_the_census_alone(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    add_to_shard(small / SHARD, "nothing", b"")
    index = json.loads((small / INDEX).read_text())
    index["weight_map"]["nothing"] = SHARD
    (small / INDEX).write_text(json.dumps(index))

    message = refused_by_hf_to_dcp(small)

    assert "1 unexpected" in message
    assert "unexpected: nothing" in message
