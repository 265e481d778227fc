"""Every layout computes what one process computes: loss, logits, all gradients, their norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from k3model.parallel.layout import Layout

Pools = Callable[[int], Any]
Step = dict[str, Any]
Compare = Callable[..., list[Step]]

SP2 = Layout(sp=2)
EP2 = Layout(dp=2, ep=2)
FSDP2 = Layout(dp=2, shards_parameters=True)
SP2_EP2 = Layout(sp=2, ep=2)
LAYOUTS = {
    "sp2": SP2,
    "ep2": EP2,
    "fsdp2": FSDP2,
    "sp2_ep2": SP2_EP2,
    "fsdp2_ep2": Layout(dp=2, ep=2, shards_parameters=True),
    "sp2_fsdp1": Layout(sp=2, shards_parameters=True),
    "ep4": Layout(dp=4, ep=4),
    "ep2_fsdp4": Layout(dp=4, ep=2, shards_parameters=True),
    "sp2_ep2_fsdp2": Layout(dp=2, sp=2, ep=2, shards_parameters=True),
    "sp2_ep4_fsdp2": Layout(dp=2, sp=2, ep=4, shards_parameters=True),
}
SLOW = ("ep4", "sp2_ep2_fsdp2", "sp2_fsdp1")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS])
def test_rows_27_29_38_f01_f10_f11_a_layout_has_the_loss_logits_gradients_and_norm_of_one_process(
    compare: Compare, name: str
) -> None:
    compare(LAYOUTS[name], "dense")


def test_recomputed_layers_dispatch_as_they_did(compare: Compare) -> None:
    compare(SP2_EP2, "dense", checkpointing=True)


@pytest.mark.parametrize(
    "layout", [SP2_EP2, Layout(cp=2, ep=2, shards_parameters=True)], ids=["sp2_ep2", "cp2_ep2_fsdp"]
)
def test_row_37_a_layer_that_is_computed_again_routes_as_it_did(pool: Pools, jobs: Any, layout: Layout) -> None:
    generator = torch.Generator().manual_seed(9)
    for _ in range(5):
        ids = torch.randint(0, 500, (2, 48), generator=generator)

        answers = pool(2).run("routings", layout=layout, batch={"input_ids": ids, "labels": ids})

        for routers in answers:
            assert len(routers) == jobs.NUM_LAYERS - 1
            for name, (forward, again) in routers:
                assert torch.equal(forward, again), name


@pytest.mark.parametrize(
    "layout", [SP2, EP2, FSDP2, Layout(cp=2, shards_parameters=True)], ids=["sp2", "ep2", "fsdp2", "cp2_fsdp"]
)
def test_f02_a_rank_without_counted_labels_enters_every_collective(compare: Compare, jobs: Any, layout: Layout) -> None:
    batch = jobs.dense()
    # Rank 1 has the second half of the tokens under sp and cp, and of the rows otherwise.
    batch["labels"][2:], batch["labels"][:, 16:] = -100, -100

    answers = compare(layout, batch)

    assert answers[1]["num_labels"] == 0


def test_f02_a_batch_without_counted_labels_has_zero_loss_and_gradient(pool: Pools, jobs: Any) -> None:
    batch = jobs.dense()
    batch["labels"].fill_(-100)

    answers = pool(2).run("step", layout=SP2_EP2, batch=batch)

    assert answers[0]["loss"] == 0
    assert not any(gradient.any() for gradient in answers[0]["gradients"].values())


def test_row_67_all_tokens_of_all_ranks_may_go_to_one_rank(pool: Pools) -> None:
    answers = pool(2).run("dispatch_to_one_rank")

    for answer in answers:
        torch.testing.assert_close(answer["out"], answer["want"], rtol=0, atol=0)
        torch.testing.assert_close(answer["grad_z"], answer["want_grad_z"], rtol=0, atol=0)
        torch.testing.assert_close(answer["grad_weights"], answer["want_grad_weights"], rtol=0, atol=0)


def test_row_27_experts_are_cut_along_dim_0_by_ep_and_along_dim_1_by_the_ranks_that_share_them(pool: Pools) -> None:
    answers = pool(4).run("expert_placements", layout=LAYOUTS["ep2_fsdp4"])

    # in the order of the axes ep_fsdp, ep
    assert answers == [{(Shard(1), Shard(0))}] * 4


@pytest.mark.parametrize("name", ["ep2", "fsdp2_ep2", "sp2_ep4_fsdp2"])
def test_rows_26_28_checkpoint_tensors_are_global_and_unpermuted(pool: Pools, name: str) -> None:
    layout = LAYOUTS[name]

    differing = pool(layout.world_size).run("state_against_whole", layout=layout)

    assert differing == [[]] * layout.world_size


def test_row_68_f08_kept_parameters_are_float32_under_fsdp_with_bf16(pool: Pools, jobs: Any) -> None:
    answers = pool(2).run("step", layout=FSDP2, batch=jobs.dense(), dtype=torch.bfloat16)

    kept = {name for name, dtype in answers[0]["dtypes"].items() if dtype == torch.float32}
    assert {name.rsplit(".", 2)[-2] for name in kept} == {"decay", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm"}
    gradients = answers[0]["gradients"]
    assert all(gradients[name].dtype == answers[0]["dtypes"][name] for name in gradients)


def test_row_38_clipping_scales_by_the_one_norm(pool: Pools, single: Callable[..., Step], jobs: Any) -> None:
    want = single("dense")
    limit = want["norm"].item() / 4

    answers = pool(2).run("step", layout=LAYOUTS["fsdp2_ep2"], batch=jobs.dense(), max_norm=limit)

    gradients = answers[0]["gradients"]
    clipped = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
    # 1e-6 is added to the norm before it divides.
    assert clipped.item() == pytest.approx(limit, rel=1e-5)
    torch.testing.assert_close(answers[1]["norm"].double(), want["norm"], rtol=1e-9, atol=0)


def test_a_rank_without_gradients_joins_the_norm(pool: Pools) -> None:
    norms = pool(2).run("norm_without_gradients", layout=FSDP2)

    assert norms == [0.0, 0.0]
