"""A trace is judged by what ran in the place of what was chosen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from k3convert.training.kernel_trace import KernelTrace, judge_ops
from k3convert.training.outcome import OpTrace
from k3kernels import K3Op

CHOSEN = {"moe_implementation": "grouped_mm", "attn_implementation": "eager"}
PRESENT = {"moe_experts/situ/grouped_mm", "mla_attention/causal/eager"}
RAN = OpTrace("moe_experts/situ/grouped_mm", 4, ("aten::_grouped_mm", "aten::mul"))


def test_chosen_implementations_that_ran_with_their_kernels_are_right() -> None:
    assert list(judge_ops((RAN,), CHOSEN, PRESENT)) == []


@pytest.mark.parametrize(
    ("ran", "fault"),
    [
        ((), "did not run"),
        ((OpTrace("moe_experts/situ/grouped_mm", 4, ("aten::mm",)),), "without a kernel named grouped_mm"),
        ((RAN, OpTrace("moe_experts/situ/eager", 1, ())), "moe_experts/situ/eager ran, grouped_mm was chosen"),
    ],
)
def test_what_did_not_run_as_chosen_is_a_fault(ran: tuple[OpTrace, ...], fault: str) -> None:
    (found,) = judge_ops(ran, CHOSEN, PRESENT)

    assert fault in found


def test_an_op_that_the_network_has_not_cannot_be_missed() -> None:
    assert list(judge_ops((), {"recurrent_kda_implementation": "fla"}, PRESENT)) == []


def test_an_alias_is_judged_by_what_it_stands_for() -> None:
    ran = (OpTrace("cross_entropy/chunked/chunk_loss", 1, ()),)

    assert list(judge_ops(ran, {"cross_entropy_implementation": "npu"}, {"cross_entropy/chunked/chunk_loss"})) == []


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.op = K3Op("rms_norm", "standard", "eager", "cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.op(x, torch.ones(8), eps=1e-5)
        return out


def test_a_recorded_step_counts_calls_and_gives_the_ops_back() -> None:
    network = nn.Sequential(_Norm(), _Norm())
    handle = network[0].op
    trace = KernelTrace(network, {"rms_norm_implementation": "eager"}, "cpu")

    with trace.recording():
        network(torch.ones(2, 8))

    (found,) = trace.report(3).ops
    assert (found.name, found.num_calls) == ("rms_norm/standard/eager", 2)
    assert any(kernel.startswith("aten::") for kernel in found.kernels)
    assert network[0].op is handle
