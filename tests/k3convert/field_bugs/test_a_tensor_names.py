"""Field reports A15, A18, A20 and A21: names, roots, ties and ranks that other writers use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3convert.errors import BadInput, BadQuantization, CensusMismatch, UnmappedNames

Convert = Callable[..., Any]
EditJson = Callable[[Path, Callable[[dict[str, Any]], None]], None]
EditTensors = Callable[[Path, Callable[[dict[str, Any]], None]], None]
SameFiles = Callable[[Path, Path], bool]
Refused = Callable[..., str]

HEAD = "language_model.lm_head.weight"
EMBEDDING = "language_model.model.embed_tokens.weight"
EXPERTS = "language_model.model.layers.1.block_sparse_moe.experts."


def same_files(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def renamed(change: Callable[[str], str]) -> Callable[[dict[str, Any]], None]:
    def apply(tensors: dict[str, Any]) -> None:
        moved = {change(name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(moved)

    return apply


def bare(name: str) -> str:
    return name.removeprefix("language_model.")


def tie_embeddings(config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = True
    config["text_config"]["tie_word_embeddings"] = True


@pytest.mark.parametrize("root", ["released", "bare"])
@pytest.mark.parametrize("kept", ["embedding", "head", "both"])
def test_a15_tied_weights_may_be_stored_under_either_name_or_both(
    small: Path,
    tmp_path: Path,
    edit_tensors: EditTensors,
    edit_json: EditJson,
    to_dcp: Convert,
    to_hf: Convert,
    kept: str,
    root: str,
) -> None:
    def tie(tensors: dict[str, Any]) -> None:
        tensors[HEAD].data = tensors[EMBEDDING].data
        if kept != "both":
            tensors.pop(HEAD if kept == "embedding" else EMBEDDING)
        if root == "bare":
            renamed(bare)(tensors)

    edit_json(small / "config.json", tie_embeddings)
    edit_tensors(small, tie)

    to_dcp(small, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert same_files(small, tmp_path / "hf")


@pytest.mark.parametrize("root", ["released", "bare"])
def test_a15_tied_weights_that_differ_are_refused(
    small: Path, edit_tensors: EditTensors, edit_json: EditJson, refused_by_hf_to_dcp: Refused, root: str
) -> None:
    edit_json(small / "config.json", tie_embeddings)
    if root == "bare":
        edit_tensors(small, renamed(bare))

    message = refused_by_hf_to_dcp(small, BadInput)

    assert "tie_word_embeddings is true" in message
    assert "lm_head.weight" in message
    assert "embed_tokens.weight" in message


def test_a15_without_a_tie_a_missing_head_is_an_error(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    edit_tensors(small, lambda tensors: tensors.pop(HEAD))

    assert f"missing: {HEAD}" in refused_by_hf_to_dcp(small, CensusMismatch)


def test_a15_with_a_tie_neither_name_is_an_error(
    small: Path, edit_tensors: EditTensors, edit_json: EditJson, refused_by_hf_to_dcp: Refused
) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        del tensors[HEAD], tensors[EMBEDDING]

    edit_json(small / "config.json", tie_embeddings)
    edit_tensors(small, drop)

    assert f"missing: {EMBEDDING}" in refused_by_hf_to_dcp(small, CensusMismatch)


def test_a18_experts_of_another_spelling_are_counted_on_both_sides(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    spelling = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

    def respell(name: str) -> str:
        if not name.startswith(EXPERTS):
            return name
        expert, matrix, leaf = name.removeprefix(EXPERTS).split(".")
        return f"{EXPERTS}{expert}.{spelling[matrix]}.{leaf}"

    edit_tensors(small, renamed(respell))

    message = refused_by_hf_to_dcp(small, CensusMismatch)

    assert "24 missing, 24 unexpected" in message
    assert f"missing: {EXPERTS}0.w1.weight_packed" in message
    assert f"unexpected: {EXPERTS}0.gate_proj.weight_packed" in message


def test_a18_stacked_plain_experts_where_pairs_are_expected_are_refused(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    def stack(tensors: dict[str, Any]) -> None:
        like = tensors[f"{EXPERTS}0.w1.weight_packed"]
        for name in [name for name in tensors if name.startswith(EXPERTS)]:
            del tensors[name]
        kind = type(like)
        tensors[f"{EXPERTS}gate_up_proj"] = kind("BF16", (4, 128, 96), bytes(2 * 4 * 128 * 96), like.shard)
        tensors[f"{EXPERTS}down_proj"] = kind("BF16", (4, 96, 64), bytes(2 * 4 * 96 * 64), like.shard)

    edit_tensors(small, stack)

    message = refused_by_hf_to_dcp(small, CensusMismatch)

    assert "24 missing, 2 unexpected" in message
    assert f"unexpected: {EXPERTS}gate_up_proj" in message


def test_a18_some_layers_packed_and_some_plain_is_refused(
    small: Path, edit_tensors: EditTensors, plain_experts: Callable[..., Any], refused_by_hf_to_dcp: Refused
) -> None:
    def decode_one_layer(tensors: dict[str, Any]) -> None:
        layer = {name: tensor for name, tensor in tensors.items() if name.startswith(EXPERTS)}
        for name in layer:
            del tensors[name]
        plain_experts("BF16")(layer)
        tensors.update(layer)

    edit_tensors(small, decode_one_layer)

    message = refused_by_hf_to_dcp(small, BadQuantization)

    assert "36 expert matrices are packed and 12 are not" in message


def test_a18_experts_of_one_stack_in_two_dtypes_are_refused(
    small: Path, edit_tensors: EditTensors, plain_experts: Callable[..., Any], refused_by_hf_to_dcp: Refused
) -> None:
    def widen_one(tensors: dict[str, Any]) -> None:
        plain_experts("BF16")(tensors)
        tensor = tensors[f"{EXPERTS}2.w1.weight"]
        tensor.dtype, tensor.data = "F32", bytes(2 * len(tensor.data))

    edit_tensors(small, widen_one)

    message = refused_by_hf_to_dcp(small, CensusMismatch)

    assert f"{EXPERTS}2.w1.weight" in message
    assert "F32" in message
    assert "BF16" in message


def test_a20_mixed_roots_are_refused_with_both_counts(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    edit_tensors(small, renamed(lambda name: bare(name) if name == HEAD else name))

    message = refused_by_hf_to_dcp(small, UnmappedNames)

    assert "1 do not" in message
    assert "lm_head.weight" in message


def test_a20_a_root_that_nobody_publishes_is_refused(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    edit_tensors(small, renamed(lambda name: f"transformer.{name}"))

    assert "no name begins with" in refused_by_hf_to_dcp(small, UnmappedNames)


def reshape_convolutions(shape: tuple[int, ...], nbytes: int | None = None) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("_conv1d.weight"):
                tensor.shape = shape
                tensor.data = tensor.data[:nbytes]

    return change


@pytest.mark.parametrize("shape", [(192, 1, 4), (192, 4), (192, 4, 1)])
def test_a21_convolutions_of_any_writers_rank_come_back_as_they_were(
    small: Path, tmp_path: Path, edit_tensors: EditTensors, to_dcp: Convert, to_hf: Convert, shape: tuple[int, ...]
) -> None:
    edit_tensors(small, reshape_convolutions(shape))

    to_dcp(small, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert same_files(small, tmp_path / "hf")


@pytest.mark.parametrize("shape", [(192, 1, 4), (192, 4), (192, 4, 1)])
def test_a21_a_base_of_another_rank_gets_its_own_rank_back(
    small: Path, small_dcp: Path, tmp_path: Path, edit_tensors: EditTensors, to_hf: Convert, shape: tuple[int, ...]
) -> None:
    edit_tensors(small, reshape_convolutions(shape))

    to_hf(small_dcp, tmp_path / "hf", like=small)

    assert same_files(small, tmp_path / "hf")


@pytest.mark.parametrize("shape", [(192, 1, 3), (192, 3), (1, 192, 4), (4, 192)])
def test_a21_a_convolution_that_the_config_does_not_describe_is_refused(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused, shape: tuple[int, ...]
) -> None:
    edit_tensors(small, reshape_convolutions(shape, 4 * 192 * min(4, shape[-1])))

    message = refused_by_hf_to_dcp(small, CensusMismatch)

    assert f"found {list(shape)}, wanted [192, 1, 4]" in message
    assert "9 of wrong shape" in message


def test_a18_a_layer_beyond_the_config_is_refused(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    edit_tensors(small, renamed(lambda name: name.replace(".layers.4.", ".layers.5.")))

    message = refused_by_hf_to_dcp(small, CensusMismatch)

    count = sum(
        ".layers.5." in name for name in json.loads((small / "model.safetensors.index.json").read_text())["weight_map"]
    )
    assert f"{count} missing, {count} unexpected" in message


def test_a18_a_base_that_is_not_what_its_config_says_is_refused(
    small: Path, small_dcp: Path, edit_tensors: EditTensors, refused_by_dcp_to_hf: Refused
) -> None:
    edit_tensors(small, lambda tensors: tensors.pop(HEAD))

    assert f"missing: {HEAD}" in refused_by_dcp_to_hf(small_dcp, CensusMismatch, like=small)
