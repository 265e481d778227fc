"""Every row that a CUDA device can run, against eager: outputs, gradients, time and memory.

Run with ``pytest -m gpu tests/k3kernels/gpu``, or ``tools/gpu_check.sh FOLDER`` for all of it in stages. Each
comparison prints one JSON line. A row whose library is missing is reported as skipped with the reason: not run, not
passed. Kernels are compiled for every dtype and width anew, so that the lengths are tried at one of each; tests that
need the same kernels are in one group, for ``pytest-xdist --dist loadgroup``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
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
Contained = Callable[[Callable[[], Any]], Any]
Results = tuple[list[Tensor], list[Tensor]]


def name_of(row: Row) -> str:
    return "-".join(row.triple)


def in_group(*values: Any, group: str) -> Any:
    """A case whose kernels are compiled for this group alone."""
    return pytest.param(*values, marks=pytest.mark.xdist_group(group))


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
    error = float((mine.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30))
    return float(f"{error:.3g}")


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


def small_group(row: Row, dtype: torch.dtype) -> str:
    return f"{row.op} {dtype}" if row.triple == ("kda", "chunk", "fla") else "others"


@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        in_group(row, dtype, group=small_group(row, dtype))
        for row in FAST_ROWS
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=lambda value: name_of(value) if isinstance(value, Row) else None,
)
def test_small_inputs_agree_with_eager_in_float64(
    row: Row, dtype: torch.dtype, op_inputs: Callable[..., Any], report: Report, contained: Contained
) -> None:
    op, forward_only = resolved(row), row.triple in FORWARD_ONLY

    def errors() -> tuple[Any, Any]:
        case = op_inputs(row.op, row.variant, "small", dtype=dtype, device="cuda", key=64, value=64)
        truth = run(eager_of(row), in_float64(case), forward_only=forward_only)
        got = run(op, case, forward_only=forward_only)
        plain = run(eager_of(row), case, forward_only=forward_only)
        return distances(case, got, truth), distances(case, plain, truth)

    (outputs, gradients), of_eager = contained(errors)

    report(row=name_of(row), size="small", dtype=str(dtype), outputs=outputs, gradients=gradients, of_eager=of_eager)
    assert max(outputs + gradients) <= tolerance(row.op, dtype)


@pytest.mark.parametrize("row", FAST_ROWS, ids=name_of)
def test_layer_sizes_agree_with_eager_and_are_measured(
    row: Row, op_inputs: Callable[..., Any], report: Report, contained: Contained
) -> None:
    op, eager, forward_only = resolved(row), eager_of(row), row.triple in FORWARD_ONLY

    def errors_and_costs() -> tuple[list[float], list[float], dict[str, Any]]:
        case = op_inputs(row.op, row.variant, "layer", dtype=torch.bfloat16, device="cuda")
        want = run(eager, case, forward_only=forward_only)
        outputs, gradients = distances(case, run(op, case, forward_only=forward_only), want)
        del want
        costs: dict[str, Any] = {}
        for prefix, one in (("", op), ("eager_", eager)):
            costs[f"{prefix}forward"] = measured(lambda one=one: run(one, case, forward_only=True))
            if not forward_only:
                costs[f"{prefix}forward_and_backward"] = measured(lambda one=one: run(one, case, forward_only=False))
        return outputs, gradients, costs

    outputs, gradients, costs = contained(errors_and_costs)

    report(row=name_of(row), size="layer", dtype="torch.bfloat16", outputs=outputs, gradients=gradients, **costs)
    assert max(outputs + gradients) <= tolerance(row.op, torch.bfloat16)


def test_all_896_experts_train_with_one_copy_of_weights_and_gradients(
    op_inputs: Callable[..., Any], report: Report, contained: Contained
) -> None:
    op = resolve("moe_experts", "situ", "grouped_mm", device="cuda")

    def train() -> tuple[int, dict[str, float], bool]:
        case = op_inputs("moe_experts", "situ", "layer", dtype=torch.bfloat16, device="cuda", experts=896)
        leaves = [x.requires_grad_(x.is_floating_point()) for x in case.args]

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            op(*leaves, **case.kwargs).float().square().mean().backward()

        cost = measured(step)
        is_finite = all(w.grad is not None and bool(w.grad.sum(dtype=torch.float32).isfinite()) for w in leaves[3:])
        return sum(w.numel() * w.element_size() for w in leaves[3:]), cost, is_finite

    weight_bytes, cost, is_finite = contained(train)

    report(row="moe_experts-situ-grouped_mm", size="896 experts", weight_bytes=weight_bytes, **cost)
    assert is_finite
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


@pytest.mark.parametrize("bounded", [in_group(True, group="kda torch.bfloat16"), in_group(False, group="kda no bound")])
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
    tokens: int, cu: list[int], gate: float | None, bounded: bool, op_inputs: Callable[..., Any], report: Report
) -> None:
    op = resolved(KDA_FLA)
    case = kda_case(op_inputs, tokens, cu, gate, key=64, value=64)
    case.kwargs["lower_bound"] = -5.0 if bounded else None

    got = case.run(op)

    outputs, gradients = distances(case, got, case.run(eager_of(KDA_FLA)))
    report(row=name_of(KDA_FLA), cu_seqlens=cu, gate=gate, bounded=bounded, outputs=outputs, gradients=gradients)
    assert max(outputs + gradients) <= tolerance("kda", torch.bfloat16)


def test_e6_fla_is_finite_at_layer_size_with_every_gate_at_its_bound(
    op_inputs: Callable[..., Any], contained: Contained
) -> None:
    op = resolved(KDA_FLA)

    def is_finite() -> bool:
        case = kda_case(op_inputs, 4096, [0, 4096], -5.0, heads=96, key=128, value=128)
        outputs, grads = case.run(op)
        return all(bool(torch.isfinite(x).all()) for x in outputs + grads)

    assert contained(is_finite)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        in_group(16, 24, group="kda 1"),
        in_group(60, 60, group="kda 1"),
        in_group(64, 128, group="kda 2"),
        in_group(100, 100, group="kda 2"),
        in_group(128, 128, group="kda 3"),
    ],
)
def test_fla_agrees_with_eager_for_all_kinds_of_widths(
    key: int, value: int, op_inputs: Callable[..., Any], report: Report
) -> None:
    op = resolved(KDA_FLA)
    case = kda_case(op_inputs, 65, [0, 65], None, key=key, value=value)

    got = case.run(op)

    outputs, gradients = distances(case, got, case.run(eager_of(KDA_FLA)))
    report(row=name_of(KDA_FLA), key=key, value=value, outputs=outputs, gradients=gradients)
    assert max(outputs + gradients) <= tolerance("kda", torch.bfloat16)


@pytest.mark.xdist_group("others")
def test_the_fused_recurrence_refuses_to_drop_gradients(op_inputs: Callable[..., Any]) -> None:
    row = next(row for row in FAST_ROWS if row.triple == ("kda", "recurrent", "fla"))
    op = resolved(row)
    case = op_inputs("kda", "recurrent", "small", dtype=torch.bfloat16, device="cuda")

    with pytest.raises(RuntimeError, match="no backward"):
        case.run(op)


@pytest.mark.xdist_group("others")
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
