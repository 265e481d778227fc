"""Parameters are stored in float32 and computed with in bfloat16, and come to a rank without ever being whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from k3model.parallel.layout import Layout

Answers = list[Any]
Run = Callable[..., Answers]

ONE = Layout()
FSDP2 = Layout(dp=2, shards_parameters=True)
MODEL = {"fields": {"attn_res_block_size": 2}, "num_layers": 4}
TIED = {"tied": True, "num_layers": 2}
MASTERS = {"dtype": torch.float32, "compute_dtype": torch.bfloat16, "model": MODEL}


def rows() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 500, (4, 8), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("layout", [ONE, Layout(pp=2)], ids=["one", "pp2"])
def test_masters_are_cast_once_where_they_are_used(run: Run, layout: Layout) -> None:
    got = run("step", layout, rows=rows(), with_logits=True, **MASTERS)[-1]

    (want,) = run("bf16_logits", ONE, rows=rows(), model=MODEL)
    assert torch.equal(got["logits"][0], want)
    assert got["dtypes"] == {torch.float32}
    assert got["loss"].dtype == torch.float32


@pytest.mark.parametrize("ep", [1, 2])
def test_the_policy_is_the_same_with_and_without_sharding(run: Run, ep: int) -> None:
    replicated = run("step", Layout(dp=2, ep=ep), rows=rows(), **MASTERS)

    sharded = run("step", Layout(dp=2, ep=ep, shards_parameters=True), rows=rows(), **MASTERS)

    assert [answer["loss"].item() for answer in replicated] == [answer["loss"].item() for answer in sharded]
    assert replicated[0]["gradients"].keys() == sharded[0]["gradients"].keys()
    for name, gradient in replicated[0]["gradients"].items():
        # a sum of two ranks has one order, so that nothing may differ
        assert torch.equal(gradient, sharded[0]["gradients"][name]), name


def test_a_network_without_masters_is_refused(run: Run) -> None:
    with pytest.raises(RuntimeError, match="parameters are not float32, which a compute dtype is cast from"):
        run("step", ONE, rows=rows(), **{**MASTERS, "dtype": torch.bfloat16})


@pytest.mark.parametrize(
    ("layout", "compute_dtype"),
    [
        (ONE, None),
        (Layout(dp=2, ep=2), torch.bfloat16),
        (Layout(dp=2, ep=2, shards_parameters=True), None),
        (Layout(pp=2), torch.bfloat16),
    ],
    ids=["one", "ep2 bf16", "fsdp2_ep2", "pp2 bf16"],
)
def test_row_25_f13_a_network_on_meta_is_filled_part_by_part(
    run: Run, tmp_path: Path, layout: Layout, compute_dtype: torch.dtype | None
) -> None:
    (wrote,) = run("save_weights", ONE, rows=rows(), folder=tmp_path, model=MODEL)

    read = run("load_from_meta", layout, rows=rows(), folder=tmp_path, model=MODEL, compute_dtype=compute_dtype)

    found: dict[str, str] = {}
    for answer in read:
        assert (answer["on_meta"], answer["poisoned"], answer["left"]) == (True, True, [])
        found |= answer["tensors"]
    assert found == wrote["tensors"]
    # float32 sums over other numbers of rows; bfloat16 rounds every activation to 2 ** -9
    tolerance = 1e-5 if compute_dtype is None else 2e-2
    torch.testing.assert_close(read[0]["loss"], wrote["loss"], rtol=tolerance, atol=0)


@pytest.mark.parametrize("layout", [ONE, FSDP2], ids=["one", "fsdp2"])
def test_f13_a_tied_head_is_tied_after_meta(run: Run, tmp_path: Path, layout: Layout) -> None:
    (wrote,) = run("save_weights", ONE, rows=rows(), folder=tmp_path, model=TIED)

    read = run("load_from_meta", layout, rows=rows(), folder=tmp_path, model=TIED)

    for answer in read:
        assert answer["is_tied"]
        assert answer["tensors"] == wrote["tensors"]
        # float32 sums over other numbers of rows
        torch.testing.assert_close(answer["loss"], wrote["loss"], rtol=1e-5, atol=0)


def test_f12_moments_are_float32_and_whole_where_nothing_is_sharded(run: Run) -> None:
    (one,) = run("moments_of_masters", ONE, rows=rows(), model=MODEL)
    sharded = run("moments_of_masters", FSDP2, rows=rows(), model=MODEL)[0]

    assert set(one.values()) == {("Tensor", torch.float32)}
    assert set(sharded.values()) == {("DTensor", torch.float32)}
    assert one.keys() == sharded.keys()
