"""What holds for every row of the table, found from the table: registering an impl tests it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3kernels import Row, listing, resolve
from k3kernels.registry import builtin_rows

ROWS = builtin_rows()
FAST_ROWS = tuple(row for row in ROWS if row.impl != "eager")
EAGER_ROWS = tuple(row for row in ROWS if row.impl == "eager")
DIFFERENTIABLE_ROWS = tuple(row for row in EAGER_ROWS if row.op != "mxfp4")  # the codec has its own tests


def name_of(row: Row) -> str:
    return "-".join(row.triple)


@pytest.mark.parametrize("row", FAST_ROWS, ids=name_of)
def test_the_signature_is_eagers(row: Row) -> None:
    eager = next(e for e in EAGER_ROWS if (e.op, e.variant) == (row.op, row.variant))

    def parameters(of: Row) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(of.load()).parameters.values()]

    assert parameters(row) == parameters(eager)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_tensors_are_positional_and_attributes_keyword_only(row: Row) -> None:
    for parameter in inspect.signature(row.load()).parameters.values():
        is_tensor = "Tensor" in str(parameter.annotation) and parameter.name not in ("cu_seqlens", "document_ids")
        assert (parameter.kind is not parameter.KEYWORD_ONLY) == is_tensor, parameter.name


@pytest.mark.parametrize("row", DIFFERENTIABLE_ROWS, ids=name_of)
def test_gradients_match_finite_differences(row: Row, op_inputs: Callable[..., Any]) -> None:
    case = op_inputs(row.op, row.variant, "tiny")
    op = row.load()

    def differentiable_outputs(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned = op(*args, **case.kwargs)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return tuple(out for out in outputs if out is not None and out.is_floating_point())

    assert torch.autograd.gradcheck(differentiable_outputs, case.leaves(), fast_mode=False)


@pytest.mark.parametrize("row", FAST_ROWS, ids=name_of)
def test_an_impl_agrees_with_eager_or_says_why_it_cannot_run(row: Row, op_inputs: Callable[..., Any]) -> None:
    found = next(one for one in listing(row.op, device="cpu") if (one.op, one.variant, one.impl) == row.triple)
    if not found.usable:
        with pytest.raises(RuntimeError, match=row.impl):
            resolve(*row.triple, device="cpu")
        return
    case = op_inputs(row.op, row.variant, "small", dtype=torch.float32)

    outputs, grads = case.run(resolve(*row.triple, device="cpu"))

    wanted, wanted_grads = case.run(resolve(row.op, row.variant, "eager", device="cpu"))
    # float32 sums in another order: a few hundred roundings of 2 ** -24
    for got, want in zip(outputs + grads, wanted + wanted_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("row", DIFFERENTIABLE_ROWS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_row_92_outputs_keep_their_contracts_dtypes(
    row: Row, dtype: torch.dtype, op_inputs: Callable[..., Any]
) -> None:
    case = op_inputs(row.op, row.variant, "small", dtype=dtype)
    inside = torch.promote_types(dtype, torch.float32)

    outputs, grads = case.run(row.load())

    wanted = {
        "kda": [dtype, inside],
        "kda_gate": [inside],
        "short_conv": [dtype, dtype],
        "cross_entropy": [inside, inside, torch.int64],
    }.get(row.op, [dtype])
    assert [out.dtype for out in outputs] == wanted
    assert [grad.dtype for grad in grads] == [x.dtype for x in case.args if x.is_floating_point()]


@pytest.mark.parametrize("row", DIFFERENTIABLE_ROWS, ids=name_of)
def test_e8_strided_views_give_what_contiguous_copies_give(row: Row, op_inputs: Callable[..., Any]) -> None:
    case = op_inputs(row.op, row.variant, "small", dtype=torch.float32)
    contiguous = case.run(row.load())
    widened = tuple(torch.stack((x, x.flip(0)), -1)[..., 0] for x in case.args)
    if any(x.is_contiguous() for x in widened if x.numel() > 1):
        pytest.fail("the views are not strided")

    outputs = row.load()(*widened, **case.kwargs)

    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for got, want in zip((out for out in outputs if out is not None), contiguous[0], strict=True):
        # a matrix product of a strided operand may sum in another order
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("row", DIFFERENTIABLE_ROWS, ids=name_of)
def test_e15_inputs_are_left_as_they_were(row: Row, op_inputs: Callable[..., Any]) -> None:
    case = op_inputs(row.op, row.variant, "small", dtype=torch.float32)
    before = [x.clone() for x in case.args]
    leaves = case.leaves()

    returned = row.load()(*leaves, **case.kwargs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    sum(out.sum() for out in outputs if out is not None and out.requires_grad).backward()

    assert all(torch.equal(x.detach(), y) for x, y in zip(leaves, before, strict=True))
