"""Sequence parallelism by heads: what one process computes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3model.parallel.layout import Layout
from k3model.parallel.sequence import SequenceShare

Pools = Callable[[int], Any]
Step = dict[str, Any]
Compare = Callable[..., list[Step]]

SP2 = Layout(sp=2)
SP2_EP2 = Layout(sp=2, ep=2)
SP4 = Layout(sp=4)
TIMING = {"K3_KDA_SP_TIMING": "1"}
PHASES = {"project", "gather", "conv", "kernel", "scatter", "output"}


@pytest.mark.parametrize("batch", ["packed", "padded"])
@pytest.mark.parametrize("layout", [SP2, SP2_EP2], ids=["sp2", "sp2_ep2"])
def test_rows_30_31_81_documents_and_padding_cross_the_cut(compare: Compare, layout: Layout, batch: str) -> None:
    compare(layout, batch)


@pytest.mark.parametrize("batch", ["dense", "packed"])
@pytest.mark.parametrize("degree", [2, 4])
def test_rows_30_31_f01_f09_four_heads_are_shared_by_two_and_four_ranks(
    compare: Compare, jobs: Any, degree: int, batch: str
) -> None:
    compare(Layout(sp=degree), batch, model={"fields": jobs.FOUR_HEADS})


@pytest.mark.parametrize(("kda_heads", "mla_heads", "refused"), [(3, 4, 3), (6, 4, 6), (4, 6, 6)])
def test_rows_34_f09_heads_of_either_kind_that_the_ranks_do_not_divide_are_refused(
    pool: Pools, jobs: Any, kda_heads: int, mla_heads: int, refused: int
) -> None:
    kda = jobs.FOUR_HEADS["linear_attn_config"] | {"num_heads": kda_heads}
    mla = {"num_attention_heads": mla_heads, "num_key_value_heads": mla_heads}
    model = {"fields": jobs.FOUR_HEADS | mla | {"linear_attn_config": kda}}

    with pytest.raises(RuntimeError, match=f"sp=4 does not divide the {refused} heads"):
        pool(4).run("step", layout=SP4, batch=jobs.dense(), model=model)


def test_f03_a_sequence_that_the_ranks_do_not_divide_is_refused(pool: Pools, jobs: Any) -> None:
    batch = {"input_ids": jobs.tokens(1, 33), "labels": jobs.tokens(1, 33)}

    with pytest.raises(RuntimeError, match="33 tokens do not divide into 2 parts; pad the sequence"):
        pool(2).run("step", layout=SP2, batch=batch)


@pytest.mark.parametrize("layout", [SP2, Layout(cp=2)], ids=["sp2", "cp2"])
def test_f03_a_padded_row_computes_what_the_row_computes_without_its_padding(
    pool: Pools, single: Callable[..., Step], jobs: Any, layout: Layout
) -> None:
    ids = jobs.tokens(1, 33)
    mask, padded_ids, labels = torch.ones(1, 34).long(), torch.zeros(1, 34).long(), torch.full((1, 34), -100)
    padded_ids[:, :33], labels[:, :33], mask[:, 33:] = ids, ids, 0

    answers = pool(2).run(
        "step", layout=layout, batch={"input_ids": padded_ids, "labels": labels, "attention_mask": mask}
    )

    want = single({"input_ids": ids, "labels": ids.clone()})
    logits = torch.cat([answer["logits"] for answer in answers], dim=1)[:, :33]
    # float64 sums in another order
    torch.testing.assert_close(logits, want["logits"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(answers[0]["loss"], want["loss"], rtol=1e-9, atol=0)
    for name, gradient in want["gradients"].items():
        torch.testing.assert_close(answers[0]["gradients"][name], gradient, rtol=1e-9, atol=1e-11)


def test_f16_rows_need_not_divide_among_the_ranks_of_a_row(compare: Compare, jobs: Any) -> None:
    ids = jobs.tokens(3, 8)

    compare(SP2, {"input_ids": ids, "labels": ids.clone()}, model={"num_layers": 1})


IMAGE_LAYOUTS = {
    "sp2": SP2,
    "cp2_fsdp": Layout(cp=2, shards_parameters=True),
    "cp2_sp2": Layout(cp=2, sp=2),
    "dp2_sp2_fsdp": Layout(dp=2, sp=2, shards_parameters=True),
}


@pytest.mark.parametrize(
    "name", ["sp2", "cp2_fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cp2_sp2", "dp2_sp2_fsdp"))]
)
def test_images_come_in_before_the_sequence_is_cut(compare: Compare, name: str) -> None:
    compare(IMAGE_LAYOUTS[name], "images", model={"vision": True})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("batch", ["dense", "packed", "padded"])
def test_row_46_loss_and_logits_of_the_first_step_have_the_bits_of_one_process(
    pool: Pools, batch: str, dtype: torch.dtype
) -> None:
    (want,) = pool(1).run("pinned_forward", layout=Layout(), batch=batch, dtype=dtype)

    for layout in (SP2, SP2_EP2):
        answers = pool(2).run("pinned_forward", layout=layout, batch=batch, dtype=dtype)

        assert [answer["loss"].item() for answer in answers] == [want["loss"].item()] * 2
        assert torch.equal(torch.cat([answer["logits"] for answer in answers], dim=1), want["logits"])


def test_the_first_label_of_the_next_rank_is_counted_once(pool: Pools, jobs: Any) -> None:
    batch = {"input_ids": jobs.tokens(1, 8), "labels": jobs.tokens(1, 8)}

    answers = pool(2).run("step", layout=SP2, batch=batch)

    assert [answer["num_labels"] for answer in answers] == [4, 3]


def test_row_32_the_gathering_path_computes_the_same_and_is_another_path(pool: Pools, compare: Compare) -> None:
    compare(SP2, "packed", variables={"K3_KDA_HEAD_SHARD": "0"})
    paths = [pool(2).run("kda_path", layout=SP2, variables={"K3_KDA_HEAD_SHARD": value})[0] for value in ("0", "1")]

    assert paths == ["GatheredKda", "HeadShardedKda"]


def test_row_32_a_value_that_is_neither_0_nor_1_is_refused(pool: Pools) -> None:
    with pytest.raises(RuntimeError, match="K3_KDA_HEAD_SHARD is 0 or 1, got 'no'"):
        pool(2).run("kda_path", layout=SP2, variables={"K3_KDA_HEAD_SHARD": "no"})


def test_row_31_convolutions_and_decay_of_some_heads_are_those_of_all_heads_bitwise(jobs: Any) -> None:
    attention = jobs.build_network(torch.float32, num_layers=1).language_model.model.layers["0"].self_attn
    streams = attention.project(torch.randn(2, 12, 128, generator=torch.Generator().manual_seed(5)))
    heads = slice(2, 5)

    inputs = attention.prepare(type(streams)(*(stream[:, :, heads] for stream in streams)), None, heads=heads)

    everything = attention.prepare(streams, None)
    assert [torch.equal(some, all_heads[:, :, heads]) for some, all_heads in zip(inputs, everything, strict=True)] == [
        True
    ] * 5


def test_f06_shares_are_contiguous_and_in_the_order_of_ranks() -> None:
    row = torch.arange(24)[None]

    shares = [SequenceShare(place, 4)(row) for place in range(4)]

    assert torch.equal(torch.cat(shares, dim=1), row)


@pytest.mark.parametrize(
    ("layout", "gathers"),
    [(Layout(sp=2), False), (Layout(sp=2), True), (Layout(cp=2, sp=2), False)],
    ids=["sp2", "sp2_gathered", "cp2_sp2"],
)
def test_row_33_rank_0_writes_one_notice_and_a_line_of_json_a_layer(pool: Pools, layout: Layout, gathers: bool) -> None:
    variables = TIMING | ({"K3_KDA_HEAD_SHARD": "0"} if gathers else {})

    answers = pool(layout.world_size).run("written_forward", layout=layout, variables=variables)

    notice, *lines = answers[0].splitlines()
    assert notice.startswith("K3_KDA_SP_TIMING=1")
    records = [json.loads(line)["kda_sp_timing"] for line in lines]
    assert [record["layer"] for record in records] == [
        f"language_model.model.layers.{layer}.self_attn" for layer in (0, 1, 2)
    ]
    for record in records:
        phases = dict(record["ms"])
        total = phases.pop("layer")
        assert set(phases) == PHASES
        # each number is rounded to 1e-4
        assert 0 < sum(phases.values()) <= total + 1e-3
    assert answers[1:] == [""] * (layout.world_size - 1)


@pytest.mark.parametrize("variables", [{}, {"K3_KDA_SP_TIMING": "0"}], ids=["unset", "0"])
def test_row_33_off_makes_no_timer_and_waits_for_no_device(pool: Pools, variables: dict[str, str]) -> None:
    answers = pool(2).run("written_forward", layout=Layout(sp=2), variables=variables, forbids_timing=True)

    assert answers == ["", ""]


def test_row_33_the_job_above_would_notice_a_timer(pool: Pools) -> None:
    with pytest.raises(RuntimeError, match="a timer was made"):
        pool(2).run("written_forward", layout=Layout(sp=2), variables=TIMING, forbids_timing=True)
