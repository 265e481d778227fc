"""Context parallelism: contiguous parts of a sequence, alone and with the other axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3model.parallel.layout import Layout

Pools = Callable[[int], Any]
Step = dict[str, Any]
Compare = Callable[..., list[Step]]

CP2 = Layout(cp=2)
CP2_FSDP = Layout(cp=2, shards_parameters=True)
CP2_SP2 = Layout(cp=2, sp=2)
CP2_SP2_EP4_FSDP = Layout(cp=2, sp=2, ep=4, shards_parameters=True)
LAYOUTS = {
    "cp2": CP2,
    "cp2_fsdp": CP2_FSDP,
    "cp2_fsdp2": Layout(dp=2, cp=2, shards_parameters=True),
    "cp2_fsdp_ep2": Layout(cp=2, ep=2, shards_parameters=True),
    "cp2_ep2": Layout(cp=2, ep=2),
    "cp2_sp2": CP2_SP2,
    "cp2_sp2_fsdp": Layout(cp=2, sp=2, shards_parameters=True),
    "cp2_sp2_ep4_fsdp": CP2_SP2_EP4_FSDP,
    "cp4": Layout(cp=4),
    "cp4_ep2_fsdp": Layout(cp=4, ep=2, shards_parameters=True),
}
# Convolutions and state are all that short documents try.
ONE_KDA_LAYER = {"num_layers": 1}


def quick(*names: str, without: str = "") -> list[Any]:
    """All layouts by name but one, of which these are tried by the quick tests."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != without
    ]


@pytest.mark.parametrize("name", quick("cp2", "cp2_fsdp2", "cp2_fsdp_ep2", "cp2_sp2_ep4_fsdp"))
def test_rows_74_75_e04_f01_a_layout_with_cp_computes_what_one_process_computes(compare: Compare, name: str) -> None:
    compare(LAYOUTS[name], "dense")


# One packed row does not divide among the ranks of dp.
@pytest.mark.parametrize("name", quick("cp4", "cp2_fsdp", "cp2_sp2", without="cp2_fsdp2"))
def test_rows_74_81_90_documents_cross_the_cuts(compare: Compare, name: str) -> None:
    compare(LAYOUTS[name], "packed")


@pytest.mark.parametrize("name", quick("cp4", "cp2_sp2_fsdp"))
def test_row_74_f03_padding_on_both_sides_crosses_the_cuts(compare: Compare, name: str) -> None:
    compare(LAYOUTS[name], "padded")


def test_row_74_ranks_of_dp_with_other_documents_enter_the_same_collectives(pool: Pools, jobs: Any) -> None:
    """FSDP joins ranks whose rows are packed, padded and whole, of other lengths, in every micro-batch."""
    packed, padded, dense = jobs.packed(), jobs.padded(), jobs.dense()
    batches = [[packed, dense, padded], [dense, padded, packed]]

    answers = pool(4).run(
        "step_of_own_batches", layout=Layout(dp=2, cp=2, shards_parameters=True), batches_of_dp=batches
    )

    want = jobs.step_of_own_batches(None, batches)
    # float64 sums in another order
    torch.testing.assert_close(answers[0]["loss"], want["loss"], rtol=1e-9, atol=0)
    for name, gradient in want["gradients"].items():
        if gradient is not None:
            torch.testing.assert_close(answers[0]["gradients"][name], gradient, rtol=1e-9, atol=1e-11)


def test_row_74_padding_between_tokens_is_refused(pool: Pools, jobs: Any) -> None:
    batch = jobs.padded()
    batch["attention_mask"][2, 9] = 0

    with pytest.raises(RuntimeError, match=r"rows \[2\] of the batch have padding between their tokens"):
        pool(2).run("step", layout=CP2, batch=batch)


@pytest.mark.parametrize("name", quick("cp2_fsdp"))
def test_row_74_recomputed_layers_pass_their_state_on_again(compare: Compare, name: str) -> None:
    compare(LAYOUTS[name], "dense", checkpointing=True)


def test_row_74_the_gathering_path_of_sp_passes_the_state_on_too(compare: Compare) -> None:
    compare(CP2_SP2, "packed", variables={"K3_KDA_HEAD_SHARD": "0"})


@pytest.mark.parametrize("own_tokens", [1, 2, 3])
def test_e05_parts_shorter_than_the_convolution_pass_its_history_through(
    compare: Compare, jobs: Any, own_tokens: int
) -> None:
    ids = jobs.tokens(2, 4 * own_tokens)

    compare(Layout(cp=4), {"input_ids": ids, "labels": ids.clone()}, model=ONE_KDA_LAYER)


@pytest.mark.parametrize("layout", [Layout(cp=4), CP2_SP2], ids=["cp4", "cp2_sp2"])
@pytest.mark.parametrize("bounds", [[0, 1, 6, 7, 8], [0, 2, 4, 8], [0, 0, 8], [0, 3, 8, 8]])
def test_e05_e09_documents_shorter_than_the_convolution_begin_and_end_anywhere(
    compare: Compare, jobs: Any, layout: Layout, bounds: list[int]
) -> None:
    ids = jobs.tokens(1, 8)

    compare(layout, {"input_ids": ids, "labels": ids.clone(), "cu_seqlens": torch.tensor(bounds)}, model=ONE_KDA_LAYER)


def test_f05_parts_need_not_be_whole_chunks_of_64(compare: Compare, jobs: Any) -> None:
    ids = jobs.tokens(1, 128)

    compare(Layout(cp=4), {"input_ids": ids, "labels": ids.clone()})


def test_row_81_packed_documents_are_the_documents_by_themselves(
    pool: Pools, single: Callable[..., Step], jobs: Any
) -> None:
    batch = jobs.packed()

    answers = pool(4).run("step", layout=CP2_SP2, batch=batch)

    logits = torch.cat([answer["logits"] for answer in answers], dim=1)
    for start, stop in ((0, 5), (5, 30), (30, 100), (100, 143), (143, 144)):
        ids = batch["input_ids"][:, start:stop]
        alone = single({"input_ids": ids, "labels": ids})["logits"]
        # float64: the chunks of the recurrence begin elsewhere, so sums run in another order
        torch.testing.assert_close(logits[:, start:stop], alone, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("first_ranks", [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 3), (0, 1, 2, 3), (0, 0, 2, 2)])
def test_states_are_chained_within_a_document_with_their_gradients(pool: Pools, first_ranks: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(4)
    lefts, transitions, weights = (
        torch.randn(4, 2, 3, 5, width, dtype=torch.float64, generator=generator) for width in (2, 5, 2)
    )

    answers = pool(4).run(
        "chain_states", lefts=lefts, transitions=transitions, weights=weights, first_ranks=first_ranks
    )

    for leaf in (lefts, transitions):
        leaf.requires_grad_()
    states = chained(lefts, transitions, first_ranks)
    # The zeros give every leaf a gradient, also where no map is used.
    unused = 0 * (lefts.sum() + transitions.sum())
    sum(((state * weight).sum() for state, weight in zip(states, weights, strict=True)), unused).backward()
    for rank, answer in enumerate(answers):
        # float64, the same few products in another order
        close = {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(answer["state"], states[rank].detach(), **close)
        torch.testing.assert_close(answer["grad_left"], lefts.grad[rank], **close)
        torch.testing.assert_close(answer["grad_transition"], transitions.grad[rank], **close)


def chained(lefts: Tensor, transitions: Tensor, first_ranks: tuple[int, ...]) -> list[Tensor]:
    """Every rank's state by the definition."""
    states = []
    for place, first in enumerate(first_ranks):
        state = torch.zeros_like(lefts[0])
        for rank in range(first, place):
            state = transitions[rank] @ state + lefts[rank]
        states.append(state)
    return states


def test_e09_nothing_not_even_nan_crosses_from_one_document_to_the_next(pool: Pools) -> None:
    lefts, transitions = torch.ones(2, 1, 1, 2, 2), torch.ones(2, 1, 1, 2, 2)
    lefts[0] = torch.nan

    answers = pool(2).run(
        "chain_states", lefts=lefts, transitions=transitions, weights=torch.ones(2, 1, 1, 2, 2), first_ranks=(0, 1)
    )

    assert not answers[1]["state"].any()
