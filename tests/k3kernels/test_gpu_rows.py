"""Every row that a CUDA device can run, against eager: outputs, gradients, time and memory.

Run with ``pytest -m gpu tests/k3kernels``. Each comparison prints one JSON line. A row whose library is missing is
reported as skipped with the reason: not run, not passed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels import Row, resolve
from k3kernels.registry import builtin_rows

pytestmark = pytest.mark.gpu

FAST_ROWS = tuple(row for row in builtin_rows() if row.impl != "eager")
FORWARD_ONLY = {("kda", "recurrent", "fla")}
TIMED_CALLS = 3

PRODUCT_OPS = ("kda", "moe_experts", "mla_attention", "cross_entropy")


def tolerance(op: str, dtype: torch.dtype) -> float:
    """How far the relative norm of an error may go.

    Ops made of matrix products: float32 may take TF32 operands, 2 ** -11 each; bfloat16 operands of a chunk's products
    are rounded to 2 ** -9, and gradients pass through several of them. The others round once at their end.
    """
    if op in PRODUCT_OPS:
        return 3e-3 if dtype == torch.float32 else 3e-2
    return 1e-5 if dtype == torch.float32 else 1e-2


Report = Callable[..., None]
Results = tuple[list[Tensor], list[Tensor]]


def name_of(row: Row) -> str:
    return "-".join(row.triple)


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    """A CUDA device with its memory free before and after."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Print one JSON line past pytest's capturing."""

    def write(**values: Any) -> None:
        with capsys.disabled():
            print("\n" + json.dumps({"device": torch.cuda.get_device_name(), **values}), flush=True)

    return write


def resolved(row: Row) -> Callable[..., Any]:
    if reason := row.unmet():
        pytest.skip(f"{name_of(row)} is not run: {reason}")
    return resolve(*row.triple, device="cuda")


def eager_of(row: Row) -> Callable[..., Any]:
    return resolve(row.op, row.variant, "eager", device="cuda")


def run(op: Callable[..., Any], case: Any, *, forward_only: bool) -> Results:
    if not forward_only:
        results: Results = case.run(op)
        return results
    with torch.no_grad():
        returned = op(*case.args, **case.kwargs)
    return [x for x in (returned if isinstance(returned, tuple) else (returned,)) if x is not None], []


def in_float64(case: Any) -> Any:
    """The same numbers, computed with from here on in float64."""
    return type(case)(tuple(x.double() if x.is_floating_point() else x for x in case.args), case.kwargs)


def distances(case: Any, got: Results, want: Results) -> tuple[list[float], list[float]]:
    """Norms of the differences of outputs and gradients, relative to the references'; infinite for what is not finite.

    KDA's gradient of g is a difference of terms like ``k * grad_k``, which at strong decay nearly cancel; its error is
    taken relative to those.
    """
    outputs, gradients = (
        [difference(mine, reference) for mine, reference in zip(*pair, strict=True)]
        for pair in zip(got, want, strict=True)
    )
    if len(gradients) > 3 and "lower_bound" in case.kwargs:
        terms = case.args[1].double() * want[1][1].double()
        gradients[3] *= float(want[1][3].double().norm() / max(want[1][3].double().norm(), terms.norm()))
    return outputs, gradients


def difference(mine: Tensor, reference: Tensor) -> float:
    assert mine.shape == reference.shape
    if not bool(torch.isfinite(mine).all()):
        return float("inf")
    return float((mine.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30))


def measured(call: Callable[[], Any]) -> dict[str, float]:
    """Median time of a call after a warm-up (which tunes the kernels), and its peak memory beyond what was held."""
    call()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times_ms = []
    for _ in range(TIMED_CALLS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(stop))
    return {
        "ms": round(statistics.median(times_ms), 3),
        "peak_bytes_beyond_inputs": torch.cuda.max_memory_allocated() - held,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", FAST_ROWS, ids=name_of)
def test_small_inputs_agree_with_eager_in_float64(
    row: Row, dtype: torch.dtype, op_inputs: Callable[..., Any], report: Report
) -> None:
    op, forward_only = resolved(row), row.triple in FORWARD_ONLY
    case = op_inputs(row.op, row.variant, "small", dtype=dtype, device="cuda", key=64, value=64)
    truth = run(eager_of(row), in_float64(case), forward_only=forward_only)

    got = run(op, case, forward_only=forward_only)

    plain = run(eager_of(row), case, forward_only=forward_only)
    outputs, gradients = distances(case, got, truth)
    of_eager = distances(case, plain, truth)
    report(row=name_of(row), size="small", dtype=str(dtype), outputs=outputs, gradients=gradients, of_eager=of_eager)
    assert max(outputs + gradients) <= tolerance(row.op, dtype)


@pytest.mark.parametrize("row", FAST_ROWS, ids=name_of)
def test_layer_sizes_agree_with_eager_and_are_measured(row: Row, op_inputs: Callable[..., Any], report: Report) -> None:
    op, forward_only = resolved(row), row.triple in FORWARD_ONLY
    case = op_inputs(row.op, row.variant, "layer", dtype=torch.bfloat16, device="cuda")
    eager = eager_of(row)

    got = run(op, case, forward_only=forward_only)

    want = run(eager, case, forward_only=forward_only)
    outputs, gradients = distances(case, got, want)
    del got, want

    def forward(one: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: run(one, case, forward_only=True)

    def both(one: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: run(one, case, forward_only=forward_only)

    report(
        row=name_of(row),
        size="layer",
        dtype="torch.bfloat16",
        outputs=outputs,
        gradients=gradients,
        forward=measured(forward(op)),
        forward_and_backward=None if forward_only else measured(both(op)),
        eager_forward=measured(forward(eager)),
        eager_forward_and_backward=None if forward_only else measured(both(eager)),
    )
    assert max(outputs + gradients) <= tolerance(row.op, torch.bfloat16)


def test_all_896_experts_train_with_one_copy_of_weights_and_gradients(
    op_inputs: Callable[..., Any], report: Report
) -> None:
    case = op_inputs("moe_experts", "situ", "layer", dtype=torch.bfloat16, device="cuda", experts=896)
    op = resolve("moe_experts", "situ", "grouped_mm", device="cuda")
    leaves = [x.requires_grad_(x.is_floating_point()) for x in case.args]
    weight_bytes = sum(w.numel() * w.element_size() for w in leaves[3:])

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        op(*leaves, **case.kwargs).float().square().mean().backward()

    cost = measured(step)

    report(row="moe_experts-situ-grouped_mm", size="896 experts", weight_bytes=weight_bytes, **cost)
    assert all(bool(torch.isfinite(w.grad).all()) for w in leaves[3:] if w.grad is not None)
    # held after the first step: weights and gradients; a step replaces the gradients and needs activations besides
    assert cost["peak_bytes_beyond_inputs"] < 0.2 * weight_bytes


KDA_FLA = next(row for row in FAST_ROWS if row.triple == ("kda", "chunk", "fla"))
CONV_FLA = next(row for row in FAST_ROWS if row.op == "short_conv")


def kda_case(op_inputs: Callable[..., Any], tokens: int, cu: list[int], gate: float | None, **sizes: int) -> Any:
    """KDA inputs with states for the documents between the offsets, optionally with every gate at one value."""
    case = op_inputs("kda", "chunk", "small", dtype=torch.bfloat16, device="cuda", tokens=tokens, **sizes)
    q, k, v, g, beta, state = case.args
    states = state[:1].repeat(len(cu) - 1, 1, 1, 1)
    case.args = (q, k, v, g if gate is None else torch.full_like(g, gate), beta, states)
    case.kwargs["cu_seqlens"] = torch.tensor(cu, device="cuda")
    return case


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("gate", [None, -5.0, -1e-6])
@pytest.mark.parametrize(
    ("tokens", "cu"),
    [
        *((tokens, [0, tokens]) for tokens in (1, 15, 16, 17, 63, 64, 65, 130)),
        (200, [0, 1, 70, 133, 200]),
        (130, [0, 0, 65, 65, 130]),
    ],
)
def test_row_89_fla_agrees_with_eager_for_all_lengths_and_both_bounds(
    tokens: int, cu: list[int], gate: float | None, bounded: bool, op_inputs: Callable[..., Any]
) -> None:
    op = resolved(KDA_FLA)
    case = kda_case(op_inputs, tokens, cu, gate, key=64, value=64)
    case.kwargs["lower_bound"] = -5.0 if bounded else None

    got = case.run(op)

    outputs, gradients = distances(case, got, case.run(eager_of(KDA_FLA)))
    assert max(outputs + gradients) <= tolerance("kda", torch.bfloat16)


def test_e6_fla_is_finite_at_layer_size_with_every_gate_at_its_bound(op_inputs: Callable[..., Any]) -> None:
    op = resolved(KDA_FLA)
    case = kda_case(op_inputs, 4096, [0, 4096], -5.0, heads=96, key=128, value=128)

    outputs, grads = case.run(op)

    assert all(bool(torch.isfinite(x).all()) for x in outputs + grads)


@pytest.mark.parametrize(("key", "value"), [(16, 24), (60, 60), (64, 128), (100, 100), (128, 128)])
def test_fla_agrees_with_eager_for_all_kinds_of_widths(key: int, value: int, op_inputs: Callable[..., Any]) -> None:
    op = resolved(KDA_FLA)
    case = kda_case(op_inputs, 65, [0, 65], None, key=key, value=value)

    got = case.run(op)

    outputs, gradients = distances(case, got, case.run(eager_of(KDA_FLA)))
    assert max(outputs + gradients) <= tolerance("kda", torch.bfloat16)


def test_the_fused_recurrence_refuses_to_drop_gradients(op_inputs: Callable[..., Any]) -> None:
    row = next(row for row in FAST_ROWS if row.triple == ("kda", "recurrent", "fla"))
    op = resolved(row)
    case = op_inputs("kda", "recurrent", "small", dtype=torch.bfloat16, device="cuda")

    with pytest.raises(RuntimeError, match="no backward"):
        case.run(op)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 65])
def test_e5_fla_convolution_agrees_with_eager_for_short_inputs(tokens: int, op_inputs: Callable[..., Any]) -> None:
    op = resolved(CONV_FLA)
    case = op_inputs("short_conv", "standard", "small", dtype=torch.float32, device="cuda", tokens=tokens)
    case.args = (*case.args[:2], case.args[2][:1])
    case.kwargs["cu_seqlens"] = torch.tensor([0, tokens], device="cuda")

    got = case.run(op)

    outputs, gradients = distances(case, got, case.run(eager_of(CONV_FLA)))
    # float32 sums of four products in another order
    assert max(outputs + gradients) <= 1e-5
