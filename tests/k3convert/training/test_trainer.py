"""Steps of the loop on one rank: what they count, what they change, what stops them."""

from __future__ import annotations

from math import isfinite

import pytest
import torch

from .conftest import Ranks


def test_accumulated_micro_batches_are_the_batch_in_loss_and_gradients(rank: Ranks) -> None:
    one = rank("accumulated", sizes=(4,))

    four = rank("accumulated", sizes=(1, 1, 1, 1))

    assert four["num_labels"] == one["num_labels"] == 15 + 1 + 7 + 13
    # the bits of a row do not depend on its neighbours here, and rows are summed in one order
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert four["gradients"].keys() == one["gradients"].keys()
    for name, gradient in one["gradients"].items():
        # fp32 sums over rows in another order: relative to the gradient's largest entry
        distance = (four["gradients"][name] - gradient).abs().max()
        assert distance <= 2e-5 * gradient.abs().max() + 1e-9, name


def test_a_step_without_labels_changes_nothing_and_the_next_goes_on(rank: Ranks) -> None:
    found = rank("unlabelled_step")

    assert found["metrics"]["num_labels"] == 0
    assert found["metrics"]["loss"] == 0.0
    assert found["metrics"]["gradient_norm"] == 0.0
    assert found["is_unchanged"]
    assert isfinite(found["following"]["loss"])
    assert found["following"]["num_labels"] == 4 * 15


def test_ranks_without_a_label_hang_nobody(two_ranks: Ranks) -> None:
    found = two_ranks("unlabelled_step", "layout=fsdp=2")

    assert found["is_unchanged"]
    assert found["following"]["num_labels"] == 4 * 15


def test_a_parameter_that_is_not_finite_is_named(rank: Ranks) -> None:
    name = "language_model.model.layers.1.input_layernorm.weight"

    found = rank("poisoned_step", parameter=name)

    assert found["metrics"]["nonfinite"] == f"the parameter {name} (rank 0)"


def test_the_first_module_whose_output_is_not_finite_is_named_and_the_step_changes_nothing(rank: Ranks) -> None:
    found = rank("poisoned_step")

    assert found["metrics"]["nonfinite"].startswith("the output of language_model.model.layers.2.self_attn.o_proj ")
    assert found["is_unchanged"]


@pytest.mark.parametrize("part", ["vision", "experts"])
def test_a_frozen_part_stays_bitwise_and_the_rest_is_trained(rank: Ranks, part: str) -> None:
    before = rank("steps", f"training.freeze=[{part}, vision]", num_steps=0)["weights"]

    found = rank("steps", f"training.freeze=[{part}, vision]", num_steps=1)
    after = found["weights"]

    fragment = {"vision": ("vision_tower.", "mm_projector."), "experts": (".experts.",)}[part]
    frozen = {name for name in before if any(piece in name for piece in fragment)}
    assert frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert not torch.equal(before["language_model.lm_head.weight"], after["language_model.lm_head.weight"])
    assert part not in found["metrics"][0]["group_norms"]


def test_group_norms_add_up_to_the_norm(rank: Ranks) -> None:
    (metrics,) = rank("steps", num_steps=1)["metrics"]

    total = sum(norm**2 for norm in metrics["group_norms"].values()) ** 0.5

    # both are fp32 sums of the same squares
    assert total == pytest.approx(metrics["gradient_norm"], rel=1e-5)
    assert set(metrics["group_norms"]) > {"attention", "experts", "router", "head", "embedding", "norms"}


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_every_real_token_is_routed_and_counted_once(rank: Ranks, checkpointing: str) -> None:
    found = rank("routes", f"model.activation_checkpointing={checkpointing}")

    # 4 rows of 16 tokens, 4 experts of 4 chosen, nothing of the padding
    assert found["counts"] == [[found["num_real"]] * 4] * 3
    assert found["num_real"] < 4 * 16


def test_the_correction_bias_is_frozen_unless_it_balances(rank: Ranks) -> None:
    name = "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    before = rank("steps", num_steps=0)["weights"][name]

    frozen = rank("steps", num_steps=1)["weights"][name]
    balanced = rank("balanced_steps")[name]

    assert torch.equal(frozen, before)
    assert not torch.equal(balanced, before)
    assert abs(float(balanced.mean())) < 1e-6


def test_fake_quantization_trains_and_keeps_masters_off_the_grid(rank: Ranks) -> None:
    plain = rank("steps", num_steps=2)["metrics"]

    rounded = rank("steps", "training.fake_quantization=true", num_steps=2)["metrics"]

    # the generated weights lie on the grid, so that the first step is the same, and the second is not
    assert rounded[0]["loss"] == plain[0]["loss"]
    assert rounded[1]["loss"] != plain[1]["loss"]


def test_moments_are_float32_and_lie_as_their_parameters(rank: Ranks) -> None:
    found = rank("optimizer_layout", "training.freeze=[]", "compute=bf16")

    assert found == {"wrong": [], "dtypes": {"torch.float32"}}


def test_sharded_parameters_have_moments_sharded_alike(two_ranks: Ranks) -> None:
    found = two_ranks("optimizer_layout", "training.freeze=[]", "layout=fsdp=2,ep=2")

    assert found["wrong"] == []


def test_bf16_compute_is_near_fp32_and_not_fp32(rank: Ranks) -> None:
    (want,) = rank("steps", num_steps=1)["metrics"]

    (found,) = rank("steps", "compute=bf16", num_steps=1)["metrics"]

    assert found["loss"] != want["loss"]
    # bf16 keeps 8 bits: the loss of untrained weights moves in its third digit at most
    assert found["loss"] == pytest.approx(want["loss"], rel=5e-3)


def test_a_network_laid_out_without_memory_reads_what_a_whole_one_reads(rank: Ranks) -> None:
    assert rank("read_against_load_model") == []


@pytest.mark.parametrize("layout", ["fsdp=2", "fsdp=2,ep=2", "ep=2"])
def test_ranks_read_their_parts_of_what_a_whole_network_reads(two_ranks: Ranks, layout: str) -> None:
    assert two_ranks("read_against_load_model", f"layout={layout}") == []
