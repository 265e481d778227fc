"""Field reports B5 to B8, B10, B16 and B17: which tensors are packed, and what is done to them.

Decoding and encoding themselves (B1 to B3, B9, B11 to B15) are tested beside the codec.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3convert.errors import BadConfig, BadQuantization, CensusMismatch, UsageError
from k3convert.execution.value_diff import diff_checkpoints
from k3convert.execution.verification import verify_checkpoint
from k3convert.planning.inspection import inspect_checkpoint

Change = Callable[[dict[str, Any]], None]
Convert = Callable[..., Any]
EditJson = Callable[[Path, Change], None]
EditTensors = Callable[[Path, Change], None]
Refused = Callable[..., str]

MODULE = "language_model.model.layers.1.block_sparse_moe.experts.2.w1"


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def add_plain(tensors: dict[str, Any]) -> None:
    like = tensors[f"{MODULE}.weight_packed"]
    tensors[f"{MODULE}.weight"] = type(like)("BF16", (64, 96), bytes(2 * 64 * 96), like.shard)


def pack_attention(tensors: dict[str, Any]) -> None:
    module = "language_model.model.layers.1.self_attn.q_proj"
    like = tensors.pop(f"{module}.weight")
    rows, columns = like.shape
    tensors[f"{module}.weight_packed"] = type(like)("U8", (rows, columns // 2), bytes(rows * columns // 2), like.shard)
    tensors[f"{module}.weight_scale"] = type(like)("U8", (rows, columns // 32), bytes(rows * columns // 32), like.shard)


def replace_packed_by_plain(tensors: dict[str, Any]) -> None:
    add_plain(tensors)
    del tensors[f"{MODULE}.weight_packed"]


FAULTS: dict[str, tuple[Change, str]] = {
    "packed alone": (drop(f"{MODULE}.weight_scale"), f"{MODULE}.weight_packed has no weight_scale beside it"),
    "scale alone": (drop(f"{MODULE}.weight_packed"), f"{MODULE}.weight_scale has no weight_packed beside it"),
    "scale and plain": (replace_packed_by_plain, f"{MODULE}.weight_scale has no weight_packed beside it"),
    "packed and plain": (add_plain, f"{MODULE} has packed weights and a plain weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_b5_a_pair_that_is_no_pair_is_refused_by_name(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused, fault: str
) -> None:
    change, words = FAULTS[fault]
    edit_tensors(small, change)

    assert words in refused_by_hf_to_dcp(small, BadQuantization)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "read",
    [inspect_checkpoint, verify_checkpoint, lambda folder: diff_checkpoints(folder, folder)],
    ids=["inspect", "verify", "diff"],
)
def test_b5_a_pair_that_is_no_pair_is_refused_by_every_command(
    small: Path, edit_tensors: EditTensors, read: Callable[[Path], object], fault: str
) -> None:
    change, words = FAULTS[fault]
    edit_tensors(small, change)

    with pytest.raises(BadQuantization) as caught:
        read(small)

    assert words in "\n".join(caught.value.offenders)


def test_b5_every_half_pair_is_counted(small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused) -> None:
    def drop_scales(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".layers.1." in name and name.endswith("_scale")]:
            del tensors[name]

    edit_tensors(small, drop_scales)

    message = refused_by_hf_to_dcp(small, BadQuantization)

    assert message.startswith("12 faults")
    assert message.count("has no weight_scale beside it") == 12


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    block: dict[str, Any] = config["text_config"]["quantization_config"]
    return block


def move_to_the_top(config: dict[str, Any]) -> None:
    config["quantization_config"] = config["text_config"].pop("quantization_config")


def declare_in_both(config: dict[str, Any]) -> None:
    config["quantization_config"] = copy.deepcopy(quantization(config))


def contradict(config: dict[str, Any]) -> None:
    declare_in_both(config)
    config["quantization_config"]["ignore"] = []


def declare_nowhere(config: dict[str, Any]) -> None:
    del config["text_config"]["quantization_config"]


@pytest.mark.parametrize("change", [move_to_the_top, declare_in_both])
def test_b6_the_declaration_may_stand_at_the_top_or_in_both_places(
    small: Path, tmp_path: Path, edit_json: EditJson, to_dcp: Convert, to_hf: Convert, change: Change
) -> None:
    edit_json(small / "config.json", change)

    report = to_dcp(small, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert not any("the tensors decide" in note for note in report.notes)
    assert (tmp_path / "hf" / "config.json").read_bytes() == (small / "config.json").read_bytes()


def test_b6_two_declarations_that_contradict_each_other_are_refused(
    small: Path, edit_json: EditJson, refused_by_hf_to_dcp: Refused
) -> None:
    edit_json(small / "config.json", contradict)

    assert "contradicts the one in text_config: ignore" in refused_by_hf_to_dcp(small, BadConfig)


def test_b6_plain_tensors_under_a_packed_declaration_are_plain_and_it_is_said(
    small: Path, tmp_path: Path, edit_tensors: EditTensors, plain_experts: Callable[..., Change], to_dcp: Convert
) -> None:
    edit_tensors(small, plain_experts("BF16"))

    report = to_dcp(small, tmp_path / "dcp")

    assert "config.json declares MXFP4 experts, the experts are plain: the tensors decide" in report.notes


def test_b6_packed_tensors_under_no_declaration_are_packed_and_it_is_said(
    small: Path, tmp_path: Path, edit_json: EditJson, to_dcp: Convert
) -> None:
    edit_json(small / "config.json", declare_nowhere)

    report = to_dcp(small, tmp_path / "dcp", experts="bf16")

    assert "config.json declares no quantization, the experts are packed MXFP4: the tensors decide" in report.notes


def test_b6_layers_without_experts_contradict_no_declaration(small: Path, tmp_path: Path, to_dcp: Convert) -> None:
    report = to_dcp(small, tmp_path / "dcp", num_layers=1)

    assert not any("the tensors decide" in note for note in report.notes)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_b6_plain_experts_are_not_packed_on_request(
    small: Path,
    tmp_path: Path,
    edit_tensors: EditTensors,
    plain_experts: Callable[..., Change],
    to_dcp: Convert,
    dtype: str,
) -> None:
    edit_tensors(small, plain_experts(dtype))

    with pytest.raises(UsageError, match=f"plain {dtype}"):
        to_dcp(small, tmp_path / "dcp", experts="packed")


def test_b7_another_group_size_is_refused_with_found_and_expected(
    small: Path, edit_json: EditJson, refused_by_hf_to_dcp: Refused
) -> None:
    def change(config: dict[str, Any]) -> None:
        quantization(config)["config_groups"]["group_0"]["weights"]["group_size"] = 16

    edit_json(small / "config.json", change)

    assert "group_size must be 32, got 16" in refused_by_hf_to_dcp(small, BadConfig)


def test_b7_scales_of_another_group_size_are_refused_with_found_and_expected(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    def halve_groups(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("w1.weight_scale"):
                tensor.shape, tensor.data = (64, 6), tensor.data * 2

    edit_tensors(small, halve_groups)

    message = refused_by_hf_to_dcp(small, CensusMismatch)

    assert "16 of wrong shape" in message
    assert f"{MODULE}.weight_scale: found [64, 6], wanted [64, 3]" in message


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "BOOL"])
def test_b2_a_scale_of_another_dtype_is_refused(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused, dtype: str
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{MODULE}.weight_scale"].dtype = dtype

    edit_tensors(small, change)

    message = refused_by_hf_to_dcp(small, CensusMismatch)

    assert f"{MODULE}.weight_scale: found {dtype}" in message


def test_b2_a_scale_in_float32_is_refused(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensor = tensors[f"{MODULE}.weight_scale"]
        tensor.dtype, tensor.data = "F32", tensor.data * 4

    edit_tensors(small, change)

    assert f"{MODULE}.weight_scale: found F32, wanted U8 or F8_E8M0" in refused_by_hf_to_dcp(small, CensusMismatch)


def test_b8_a_packed_module_that_is_no_expert_is_refused_and_its_pattern_is_found_by_hf_name(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    edit_tensors(small, pack_attention)

    message = refused_by_hf_to_dcp(small, BadQuantization)

    assert (
        "language_model.model.layers.1.self_attn.q_proj is packed, though the quantization config ignores it" in message
    )


def test_b8_without_a_pattern_it_is_refused_as_no_expert(
    small: Path, edit_tensors: EditTensors, edit_json: EditJson, refused_by_hf_to_dcp: Refused
) -> None:
    edit_json(small / "config.json", lambda config: quantization(config).update(ignore=[]))
    edit_tensors(small, pack_attention)

    assert "self_attn.q_proj is packed, though it is no routed expert" in refused_by_hf_to_dcp(small, BadQuantization)


def test_b10_the_layout_of_another_family_is_refused(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused
) -> None:
    experts = "language_model.model.layers.1.block_sparse_moe.experts."

    def as_gpt_oss(tensors: dict[str, Any]) -> None:
        like = tensors[f"{MODULE}.weight_packed"]
        for name in [name for name in tensors if name.startswith(experts)]:
            del tensors[name]
        for name, shape in (("blocks", (4, 128, 3, 16)), ("scales", (4, 128, 3))):
            size = 4 * 128 * 3 * (16 if name == "blocks" else 1)
            tensors[f"{experts}gate_up_proj_{name}"] = type(like)("U8", shape, bytes(size), like.shard)

    edit_tensors(small, as_gpt_oss)

    message = refused_by_hf_to_dcp(small, CensusMismatch)

    assert f"unexpected: {experts}gate_up_proj_blocks" in message
    assert f"unexpected: {experts}gate_up_proj_scales" in message


def test_b10_gate_and_up_are_never_interleaved(small_source: Path, tmp_path: Path, to_dcp: Convert) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from torch.distributed import checkpoint

    from k3kernels.ops.mxfp4.dequantize.eager import dequantize

    to_dcp(small_source, tmp_path / "dcp", experts="bf16")
    fqn = "language_model.model.layers.1.block_sparse_moe.experts.w1"
    loaded = {fqn: torch.empty(4, 64, 96, dtype=torch.bfloat16)}
    checkpoint.load(loaded, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)

    source = load_file(small_source / "model-00002-of-000008.safetensors")
    for expert in range(4):
        name = fqn.replace("experts.", f"experts.{expert}.")
        want = dequantize(source[f"{name}.weight_packed"], source[f"{name}.weight_scale"])
        assert torch.equal(loaded[fqn][expert].float(), want)


@pytest.mark.parametrize("experts", [None, "packed"])
def test_b16_a_packed_source_is_never_packed_again(
    small_source: Path, small_dcp: Path, tmp_path: Path, to_hf: Convert, experts: str | None
) -> None:
    report = to_hf(small_dcp, tmp_path / "hf", experts=experts)

    assert "mxfp4" not in report.details
    for path in small_source.iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


def test_b17_packed_bytes_stay_integers_and_other_integers_are_left_out_by_name(
    small_source: Path, small_dcp: Path, tmp_path: Path, to_hf: Convert
) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint

    reader = checkpoint.FileSystemReader(str(small_dcp))
    stored = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    checkpoint.load(state, storage_reader=reader, no_dist=True)
    state |= {"tokens_seen": torch.tensor([1 << 40]), "mask": torch.tensor([True, False])}
    checkpoint.save(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)

    report = to_hf(tmp_path / "saved", tmp_path / "hf", like=small_source)

    assert report.details["left_out"] == ["mask", "tokens_seen"]
    for path in small_source.iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("byte", [253, 254, 255])
def test_scale_bytes_without_a_finite_bf16_are_refused_with_tensor_row_block_and_byte(
    small: Path, edit_tensors: EditTensors, refused_by_hf_to_dcp: Refused, byte: int
) -> None:
    def raise_scales(tensors: dict[str, Any]) -> None:
        packed, scale = tensors[f"{MODULE}.weight_packed"], tensors[f"{MODULE}.weight_scale"]
        packed.data = bytes([0x77]) * len(packed.data)
        scale.data = scale.data[:10] + bytes([byte]) * 2 + scale.data[12:]

    edit_tensors(small, raise_scales)

    message = refused_by_hf_to_dcp(small, experts="bf16")

    assert message.startswith("2 MXFP4 blocks")
    assert f"{MODULE}.weight_packed: row 3, block 1, scale byte {byte}" in message
    assert f"{MODULE}.weight_packed: row 3, block 2, scale byte {byte}" in message


def test_nan_scales_move_only_when_asked_and_come_back(
    small: Path,
    tmp_path: Path,
    edit_tensors: EditTensors,
    refused_by_hf_to_dcp: Refused,
    to_dcp: Convert,
    to_hf: Convert,
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        scale = tensors[f"{MODULE}.weight_scale"]
        scale.data = b"\xff\xff" + scale.data[2:]

    edit_tensors(small, change)

    message = refused_by_hf_to_dcp(small, BadQuantization)
    to_dcp(small, tmp_path / "dcp", allow_nan_scales=True)
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert f"{MODULE}.weight_scale: 2 scale bytes are 255" in message
    for path in small.iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_plain_form_of_nan_scales_is_refused_on_the_way_back(
    small: Path, tmp_path: Path, edit_tensors: EditTensors, to_dcp: Convert, refused_by_dcp_to_hf: Refused
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        scale = tensors[f"{MODULE}.weight_scale"]
        scale.data = b"\xff" + scale.data[1:]

    edit_tensors(small, change)
    to_dcp(small, tmp_path / "dcp", allow_nan_scales=True)

    message = refused_by_dcp_to_hf(tmp_path / "dcp", experts="bf16")

    assert f"{MODULE}.weight_packed: row 0, block 0, scale byte 255" in message


def test_json_of_the_quantization_block_is_not_needed_to_come_back(
    small: Path, tmp_path: Path, edit_json: EditJson, to_dcp: Convert, to_hf: Convert
) -> None:
    edit_json(small / "config.json", declare_nowhere)
    to_dcp(small, tmp_path / "dcp", experts="bf16")

    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())["text_config"]
    for path in small.glob("*.safetensors"):
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name
