"""Field reports C2, C3 and C16: dtypes, names and shapes of a DCP against those that are wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from k3convert.errors import BadMetadata, CensusMismatch

Change = Callable[[dict[str, torch.Tensor]], None]
Convert = Callable[..., Any]
Refused = Callable[..., str]

LAYER = "language_model.model.layers.1."
DECAY = f"{LAYER}self_attn.A_log"
BIAS = f"{LAYER}block_sparse_moe.gate.e_score_correction_bias"
NORM = "language_model.model.norm.weight"


@pytest.fixture
def save(small_dcp: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """The small checkpoint as torch saves it after a change."""

    def save_changed(change: Change) -> Path:
        reader = checkpoint.FileSystemReader(str(small_dcp))
        stored = reader.read_metadata().state_dict_metadata
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
        checkpoint.load(state, storage_reader=reader, no_dist=True)
        change(state)
        checkpoint.save(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
        return tmp_path / "saved"

    return save_changed


def cast(name: str, dtype: torch.dtype) -> Change:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[name] = state[name].to(dtype)

    return change


def replace(name: str, tensor: torch.Tensor) -> Change:
    return lambda state: state.update({name: tensor})


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn])
def test_c2_a_dtype_that_would_have_to_be_cast_is_refused_with_both(
    save: Callable[[Change], Path], small_source: Path, refused_by_dcp_to_hf: Refused, dtype: torch.dtype
) -> None:
    message = refused_by_dcp_to_hf(save(cast(BIAS, dtype)), CensusMismatch, like=small_source)

    assert f"{BIAS}: stored" in message
    assert "wanted F32" in message


def test_c2_an_integer_is_not_narrowed_to_packed_bytes(
    save: Callable[[Change], Path], small_source: Path, refused_by_dcp_to_hf: Refused
) -> None:
    stack = f"{LAYER}block_sparse_moe.experts.w1.weight_packed"

    message = refused_by_dcp_to_hf(save(cast(stack, torch.int64)), CensusMismatch, like=small_source)

    assert message.count("stored I64, wanted U8") == 4


@pytest.mark.parametrize("name", [DECAY, BIAS])
def test_c2_a_float32_tensor_held_as_bf16_is_reported(
    save: Callable[[Change], Path], small_source: Path, tmp_path: Path, to_hf: Convert, name: str
) -> None:
    report = to_hf(save(cast(name, torch.bfloat16)), tmp_path / "hf", like=small_source)

    assert "1 tensors are stored as BF16 and become F32, as the base has them" in report.notes


def test_c3_what_is_missing_and_what_is_left_over_are_both_named(
    save: Callable[[Change], Path], small_source: Path, refused_by_dcp_to_hf: Refused
) -> None:
    def misspell(state: dict[str, torch.Tensor]) -> None:
        state["language_model.model.final_norm.weight"] = state.pop(NORM)

    message = refused_by_dcp_to_hf(save(misspell), CensusMismatch, like=small_source)

    assert f"missing: {NORM}" in message
    assert "language_model.model.final_norm.weight" in message


@pytest.mark.parametrize(
    "extra",
    [
        "language_model.model.layers.5.input_layernorm.weight",
        "language_model.model.extra_norm.weight",
        "vision_tower.x",
    ],
)
def test_c3_a_tensor_of_the_network_that_has_no_place_is_refused(
    save: Callable[[Change], Path], small_source: Path, refused_by_dcp_to_hf: Refused, extra: str
) -> None:
    message = refused_by_dcp_to_hf(save(replace(extra, torch.ones(4))), CensusMismatch, like=small_source)

    assert f"unexpected: {extra}" in message


def test_c3_training_state_is_left_out_and_listed(
    save: Callable[[Change], Path], small_source: Path, tmp_path: Path, to_hf: Convert
) -> None:
    extra = {"optim.state.0.exp_avg": torch.ones(4), "rng": torch.ones(2), "model_ema.decay": torch.ones(1)}

    report = to_hf(save(lambda state: state.update(extra)), tmp_path / "hf", like=small_source)

    assert report.details["left_out"] == sorted(extra)


def test_c3_one_parameter_under_two_names_is_refused(
    save: Callable[[Change], Path], small_source: Path, refused_by_dcp_to_hf: Refused
) -> None:
    holder = DECAY.replace("A_log", "decay.A_log")

    message = refused_by_dcp_to_hf(save(replace(holder, torch.ones(6))), BadMetadata, like=small_source)

    assert DECAY in message


@pytest.mark.parametrize("length", [1, 5, 7, 64, 127, 129, 256])
def test_c16_a_decay_of_another_number_of_heads_is_refused(
    save: Callable[[Change], Path], small_source: Path, refused_by_dcp_to_hf: Refused, length: int
) -> None:
    message = refused_by_dcp_to_hf(save(replace(DECAY, torch.ones(length))), CensusMismatch, like=small_source)

    assert f"{DECAY}: stored [{length}], wanted [128]" in message


@pytest.fixture
def unpadded(small: Path, edit_tensors: Callable[..., None]) -> Path:
    """The small checkpoint with A_log stored without padding."""

    def cut(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".A_log"):
                tensor.shape, tensor.data = (6,), tensor.data[:24]

    edit_tensors(small, cut)
    return small


def cut_decays(state: dict[str, torch.Tensor]) -> None:
    for name in state:
        if name.endswith(".A_log"):
            state[name] = state[name][:6].clone()


@pytest.mark.parametrize("change", [cut_decays, lambda state: None], ids=["unpadded", "padded"])
@pytest.mark.parametrize("base", ["unpadded", "padded"])
def test_c16_padding_follows_the_base_whatever_was_saved(
    save: Callable[[Change], Path],
    small_source: Path,
    unpadded: Path,
    tmp_path: Path,
    to_hf: Convert,
    change: Change,
    base: str,
) -> None:
    like = small_source if base == "padded" else unpadded

    to_hf(save(change), tmp_path / "hf", like=like)

    for path in like.iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("value", [1.0, float("nan"), 1e-45])
def test_c16_padding_that_is_not_zero_is_not_cut_off(
    save: Callable[[Change], Path], unpadded: Path, refused_by_dcp_to_hf: Refused, value: float
) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[DECAY][100] = value

    message = refused_by_dcp_to_hf(save(change), like=unpadded)

    assert DECAY in message
    assert "not zero" in message


@pytest.mark.parametrize("name", [f"{LAYER}self_attn.q_proj.weight", f"{LAYER}block_sparse_moe.gate.weight"])
def test_c16_a_tensor_padded_for_a_kernel_is_refused(
    save: Callable[[Change], Path], small_source: Path, refused_by_dcp_to_hf: Refused, name: str
) -> None:
    def pad(state: dict[str, torch.Tensor]) -> None:
        rows, columns = state[name].shape
        padded = torch.zeros(512, columns, dtype=state[name].dtype)
        padded[:rows] = state[name]
        state[name] = padded

    message = refused_by_dcp_to_hf(save(pad), CensusMismatch, like=small_source)

    assert f"{name}: stored [512, 128], wanted" in message
