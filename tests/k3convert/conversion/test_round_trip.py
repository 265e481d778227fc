"""HF -> DCP -> HF on whole checkpoints: the files come back byte for byte."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3convert.execution.conversion import ConversionReport, RunOptions

Convert = Callable[..., ConversionReport]
SameFolders = Callable[[Path, Path], None]


@pytest.mark.parametrize("experts", ["packed", "bf16"])
def test_files_come_back_byte_for_byte(
    tiny_source: Path, tmp_path: Path, experts: str, to_dcp: Convert, to_hf: Convert, assert_same_folders: SameFolders
) -> None:
    to_dcp(tiny_source, tmp_path / "dcp", experts=experts)

    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert_same_folders(tiny_source, tmp_path / "hf")


@pytest.mark.parametrize("chunk_bytes", [1 << 10, 5_000, 64 << 10])
@pytest.mark.parametrize("experts", ["packed", "bf16"])
def test_any_chunk_size_comes_back(
    small_source: Path,
    tmp_path: Path,
    experts: str,
    chunk_bytes: int,
    to_dcp: Convert,
    to_hf: Convert,
    assert_same_folders: SameFolders,
) -> None:
    to_dcp(small_source, tmp_path / "dcp", experts=experts, chunk_bytes=chunk_bytes)

    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert_same_folders(small_source, tmp_path / "hf")


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    small_source: Path, tmp_path: Path, workers: int, to_dcp: Convert, assert_same_folders: SameFolders
) -> None:
    to_dcp(small_source, tmp_path / "one", RunOptions(workers=1), experts="bf16")

    to_dcp(small_source, tmp_path / "many", RunOptions(workers=workers), experts="bf16")

    assert_same_folders(tmp_path / "one", tmp_path / "many")


def test_a_source_without_an_index_comes_back_without_one(
    small: Path,
    tmp_path: Path,
    edit_tensors: Callable,
    to_dcp: Convert,
    to_hf: Convert,
    assert_same_folders: SameFolders,
) -> None:
    def into_one_file(tensors: dict) -> None:
        for tensor in tensors.values():
            tensor.shard = "model.safetensors"

    edit_tensors(small, into_one_file)
    (small / "model.safetensors.index.json").unlink()

    to_dcp(small, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert_same_folders(small, tmp_path / "hf")


@pytest.mark.parametrize("experts", ["packed", "bf16"])
def test_a_source_of_the_bare_root_comes_back_under_it(
    small: Path,
    tmp_path: Path,
    edit_tensors: Callable,
    experts: str,
    to_dcp: Convert,
    to_hf: Convert,
    assert_same_folders: SameFolders,
) -> None:
    def strip_root(tensors: dict) -> None:
        renamed = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    edit_tensors(small, strip_root)

    report = to_dcp(small, tmp_path / "dcp", experts=experts)
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert any("begin with model." in note for note in report.notes)
    assert_same_folders(small, tmp_path / "hf")


def test_an_unpadded_decay_comes_back_unpadded(
    small: Path,
    tmp_path: Path,
    edit_tensors: Callable,
    to_dcp: Convert,
    to_hf: Convert,
    assert_same_folders: SameFolders,
) -> None:
    def cut(tensors: dict) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".A_log"):
                tensor.shape, tensor.data = (6,), tensor.data[: 6 * 4]

    edit_tensors(small, cut)

    to_dcp(small, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert_same_folders(small, tmp_path / "hf")


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_plain_source_moves_as_it_is(
    small: Path,
    tmp_path: Path,
    edit_tensors: Callable,
    plain_experts: Callable,
    dtype: str,
    to_dcp: Convert,
    to_hf: Convert,
    assert_same_folders: SameFolders,
) -> None:
    edit_tensors(small, plain_experts(dtype))

    to_dcp(small, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert_same_folders(small, tmp_path / "hf")


@pytest.mark.parametrize("experts", ["packed", "bf16"])
def test_the_first_layers_make_a_consistent_checkpoint(
    small_source: Path, tmp_path: Path, experts: str, to_dcp: Convert, to_hf: Convert, assert_same_folders: SameFolders
) -> None:
    to_dcp(small_source, tmp_path / "dcp", experts=experts, num_layers=4)
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    to_dcp(tmp_path / "hf", tmp_path / "again", experts=experts)
    to_hf(tmp_path / "again", tmp_path / "hf-again")

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["text_config"]["num_hidden_layers"] == 4
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 4 + 3
    assert_same_folders(tmp_path / "hf", tmp_path / "hf-again")


def test_empty_files_and_folders_of_assets_come_back(
    small: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert, assert_same_folders: SameFolders
) -> None:
    (small / "figures").mkdir()
    (small / "figures" / "one.txt").write_text("a figure")
    (small / "empty.txt").touch()

    to_dcp(small, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert_same_folders(small, tmp_path / "hf")


def test_scales_of_another_dtype_decode_to_the_same_values(
    small: Path, tmp_path: Path, edit_tensors: Callable, to_dcp: Convert
) -> None:
    as_e8m0 = Path(shutil.copytree(small, tmp_path / "e8m0"))

    def rename_dtype(tensors: dict) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".weight_scale"):
                tensor.dtype = "F8_E8M0"

    edit_tensors(as_e8m0, rename_dtype)
    to_dcp(small, tmp_path / "a", experts="bf16", keep_scales=False)
    to_dcp(as_e8m0, tmp_path / "b", experts="bf16", keep_scales=False)

    files = sorted(path.name for path in (tmp_path / "a").glob("*.distcp"))
    assert all(filecmp.cmp(tmp_path / "a" / name, tmp_path / "b" / name, shallow=False) for name in files)
