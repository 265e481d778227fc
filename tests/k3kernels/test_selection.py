"""Config fields: what they choose, when they are read, and what they refuse."""

from __future__ import annotations

from dataclasses import fields

import pytest

from k3kernels import GpuKernelRequirement, K3Op, OpsConfig, Registry, register_op, resolve_op_impl, selected, using
from k3kernels.selection import FIELD_OPS

ARCHITECTURE_FIELDS = {
    "chunk_kda_implementation",
    "situ_and_mul_implementation",
    "moe_implementation",
    "attn_implementation",
    "rms_norm_implementation",
    "attn_res_implementation",
    "cross_entropy_implementation",
}


def test_row_7_without_a_config_every_field_is_eager() -> None:
    assert {resolve_op_impl(field) for field in FIELD_OPS} == {"eager"}


def test_row_7_the_installed_config_chooses() -> None:
    with using(OpsConfig(moe_implementation="grouped_mm")):
        inside = selected("moe_implementation")

    assert inside is K3Op("moe_experts", "situ", "grouped_mm")
    assert selected("moe_implementation") is K3Op("moe_experts", "situ", "eager")


def test_row_7_a_later_config_does_not_retarget_a_handle() -> None:
    with using(OpsConfig(attn_implementation="sdpa")):
        handle = selected("attn_implementation")
        with using(OpsConfig()):
            assert selected("attn_implementation").impl == "eager"

        assert handle.impl == "sdpa"


def test_row_7_the_alias_of_other_frameworks_is_understood() -> None:
    with using(OpsConfig(cross_entropy_implementation="npu")):
        assert resolve_op_impl("cross_entropy_implementation") == "chunk_loss"


def test_row_7_an_unknown_field_is_refused() -> None:
    with pytest.raises(KeyError, match="no ops field 'kda'"):
        selected("kda")


def test_row_9_the_fields_default_to_eager_and_name_registered_ops(fresh_registry: Registry) -> None:
    config = OpsConfig()

    assert {field.name for field in fields(config)} == set(FIELD_OPS)
    assert set(FIELD_OPS) >= ARCHITECTURE_FIELDS
    assert config.problems(device="cpu") == ()


def test_row_9_a_third_party_impl_can_be_chosen(fresh_registry: Registry) -> None:
    register_op("rms_norm", "standard", "theirs", wrapper=lambda x: x, description="somebody else's")

    with using(OpsConfig.of({"rms_norm": "theirs"})):
        assert selected("rms_norm_implementation")(7) == 7


def test_row_9_unknown_choices_are_all_listed() -> None:
    with pytest.raises(KeyError, match="no ops field magic_implementation, more_implementation"):
        OpsConfig.of({"more": "eager", "magic": "eager", "moe": "eager"})


def test_row_10_choices_that_cannot_run_here_are_all_reported(fresh_registry: Registry) -> None:
    register_op("rms_norm", "standard", "gpu", wrapper=len, description="x", requirement=GpuKernelRequirement())
    config = OpsConfig(moe_implementation="fused", rms_norm_implementation="gpu", chunk_kda_implementation="eager")

    problems = config.problems(device="cpu")

    assert problems == (
        "rms_norm_implementation=gpu: rms_norm/standard/gpu is registered for cuda, not for cpu",
        "moe_implementation=fused: moe_experts/situ has no impl 'fused'; it has: eager, grouped_mm",
    )


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu", "mlu"])
def test_row_10_the_defaults_run_on_every_device(device: str) -> None:
    assert OpsConfig().problems(device=device) == ()
