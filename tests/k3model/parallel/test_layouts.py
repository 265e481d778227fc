"""Every layout computes what one process computes: loss, logits, all gradients, their norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3model.parallel.layout import Layout

Pools = Callable[[int], Any]
Step = dict[str, Any]

# float64: sums over tokens are split between ranks, and matrix products have other numbers of rows, so that sums run in
# another order. The tolerance leaves the rounding of such sums (1e-16 each) five decimal orders.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}

FOUR_HEADS = {
    "linear_attn_config": {
        "full_attn_layers": [4, 5],
        "gate_lower_bound": -5.0,
        "head_dim": 32,
        "kda_layers": [1, 2, 3],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": False,
    },
    "num_hidden_layers": 5,
}


def _jobs() -> Any:
    spec = spec_from_file_location("jobs", Path(__file__).with_name("jobs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


jobs = _jobs()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 500, (batch, length), generator=torch.Generator().manual_seed(11))


def dense() -> dict[str, Tensor]:
    """Four rows whose labels are counted unequally: in the second half of the rows only a few."""
    ids = tokens(4, 32)
    labels = ids.clone()
    labels[2:, 5:] = -100
    labels[0, 20:] = -100
    return {"input_ids": ids, "labels": labels}


def packed() -> dict[str, Tensor]:
    """Documents in one row, of which some cross every cut."""
    ids = tokens(1, 144)
    return {"input_ids": ids, "labels": ids.clone(), "cu_seqlens": torch.tensor([0, 5, 30, 30, 100, 143, 144])}


def padded() -> dict[str, Tensor]:
    ids, mask = tokens(4, 24), torch.ones(4, 24, dtype=torch.long)
    mask[0, 20:], mask[1, :7], mask[3, 2:] = 0, 0, 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


BATCHES = {"dense": dense, "packed": packed, "padded": padded}


@pytest.fixture(scope="session")
def single() -> Callable[..., Step]:
    """The same step on one process, once a batch."""
    steps: dict[tuple[str, str], Step] = {}

    def get(batch: str, **options: Any) -> Step:
        key = (batch, repr(options))
        if key not in steps:
            steps[key] = jobs.step(None, BATCHES[batch](), **options)
        return steps[key]

    return get


def logits_of(answers: list[Step], layout: Layout) -> Tensor:
    """The ranks' logits as those of the whole batch."""
    parts = layout.sequence_parts
    rows = [
        torch.cat([answer["logits"] for answer in answers[first : first + parts]], dim=1)
        for first in range(0, len(answers), parts)
    ]
    return torch.cat(rows)


def assert_equal_steps(answers: list[Step], layout: Layout, want: Step, tolerance: Mapping[str, float]) -> None:
    torch.testing.assert_close(logits_of(answers, layout), want["logits"], **tolerance)
    for answer in answers:
        torch.testing.assert_close(answer["loss"], want["loss"], **tolerance)
        torch.testing.assert_close(answer["norm"].to(want["norm"].dtype), want["norm"], **tolerance)
    gradients = answers[0]["gradients"]
    assert set(want["gradients"]) <= set(gradients)
    for name, gradient in gradients.items():
        if name in want["gradients"]:
            torch.testing.assert_close(
                gradient, want["gradients"][name], **tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert not gradient.any(), name


SP2 = Layout(sp=2)
EP2 = Layout(dp=2, ep=2)
FSDP2 = Layout(dp=2, shards_parameters=True)
SP2_EP2 = Layout(sp=2, ep=2)
CP2 = Layout(cp=2)
LAYOUTS = {
    "sp2": SP2,
    "ep2": EP2,
    "fsdp2": FSDP2,
    "sp2_ep2": SP2_EP2,
    "cp2": CP2,
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
    pool: Pools, single: Callable[..., Step], name: str
) -> None:
    layout = LAYOUTS[name]

    answers = pool(layout.world_size).run("step", layout=layout, batch=dense())

    assert_equal_steps(answers, layout, single("dense"), TOLERANCE)


@pytest.mark.parametrize("batch", ["packed", "padded"])
@pytest.mark.parametrize("layout", [SP2, SP2_EP2], ids=["sp2", "sp2_ep2"])
def test_row_81_documents_and_padding_cross_the_cut_of_a_sequence(
    pool: Pools, single: Callable[..., Step], layout: Layout, batch: str
) -> None:
    answers = pool(2).run("step", layout=layout, batch=BATCHES[batch]())

    assert_equal_steps(answers, layout, single(batch), TOLERANCE)


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_74_75_90_e04_documents_cross_the_cuts_of_contiguous_parts(
    pool: Pools, single: Callable[..., Step], world_size: int
) -> None:
    layout = Layout(cp=world_size)

    answers = pool(world_size).run("step", layout=layout, batch=packed())

    assert_equal_steps(answers, layout, single("packed"), TOLERANCE)


def test_row_74_parts_shorter_than_the_convolution_hand_its_history_through(pool: Pools) -> None:
    ids, layout = tokens(1, 8), Layout(cp=4)
    batch = {"input_ids": ids, "labels": ids.clone(), "cu_seqlens": torch.tensor([0, 1, 6, 7, 8])}

    answers = pool(4).run("step", layout=layout, batch=batch)

    assert_equal_steps(answers, layout, jobs.step(None, batch), TOLERANCE)


def test_row_74_recomputed_layers_hand_their_state_on_again(pool: Pools, single: Callable[..., Step]) -> None:
    answers = pool(2).run("step", layout=CP2, batch=packed(), checkpointing=True)

    assert_equal_steps(answers, CP2, single("packed"), TOLERANCE)


def test_row_74_a_padded_batch_is_refused_under_cp(pool: Pools) -> None:
    with pytest.raises(RuntimeError, match="pack its documents into one row"):
        pool(2).run("step", layout=CP2, batch=padded())


def test_row_31_four_heads_are_shared_by_four_ranks(pool: Pools, single: Callable[..., Step]) -> None:
    layout, model = Layout(sp=4), {"fields": FOUR_HEADS}

    answers = pool(4).run("step", layout=layout, batch=packed(), model=model)

    assert_equal_steps(answers, layout, single("packed", model=model), TOLERANCE)


def test_row_34_six_heads_are_not_shared_by_four_ranks(pool: Pools) -> None:
    with pytest.raises(RuntimeError, match="6 heads do not divide into sp=4"):
        pool(4).run("step", layout=Layout(sp=4), batch=dense())


def test_f03_a_sequence_that_the_ranks_do_not_divide_is_refused(pool: Pools) -> None:
    with pytest.raises(RuntimeError, match="33 tokens do not divide into 2 parts"):
        pool(2).run("step", layout=SP2, batch={"input_ids": tokens(1, 33)})


def test_recomputed_layers_dispatch_as_they_did(pool: Pools, single: Callable[..., Step]) -> None:
    answers = pool(2).run("step", layout=SP2_EP2, batch=dense(), checkpointing=True)

    assert_equal_steps(answers, SP2_EP2, single("dense"), TOLERANCE)


def test_row_32_the_gathering_path_computes_the_same_and_is_another_path(
    pool: Pools, single: Callable[..., Step]
) -> None:
    answers = pool(2).run("step", layout=SP2, batch=packed(), variables={"K3_KDA_HEAD_SHARD": "0"})
    paths = [pool(2).run("kda_path", layout=SP2, variables={"K3_KDA_HEAD_SHARD": value})[0] for value in ("0", "1")]

    assert_equal_steps(answers, SP2, single("packed"), TOLERANCE)
    assert paths == ["GatheredKda", "HeadShardedKda"]


@pytest.mark.parametrize("layout", [SP2, EP2, FSDP2], ids=["sp2", "ep2", "fsdp2"])
def test_f02_a_rank_without_counted_labels_enters_every_collective(pool: Pools, layout: Layout) -> None:
    batch = dense()
    # Rank 1 has the second half of the tokens under sp, and of the rows otherwise.
    batch["labels"][2:], batch["labels"][:, 16:] = -100, -100

    answers = pool(2).run("step", layout=layout, batch=batch)

    assert answers[1]["num_labels"] == 0
    assert_equal_steps(answers, layout, jobs.step(None, batch), TOLERANCE)


def test_f02_a_batch_without_counted_labels_has_zero_loss_and_gradient(pool: Pools) -> None:
    batch = dense()
    batch["labels"].fill_(-100)

    answers = pool(2).run("step", layout=SP2_EP2, batch=batch)

    assert answers[0]["loss"] == 0
    assert not any(gradient.any() for gradient in answers[0]["gradients"].values())


def test_the_first_label_of_the_next_rank_is_counted_once(pool: Pools) -> None:
    answers = pool(2).run("step", layout=SP2, batch={"input_ids": tokens(1, 8), "labels": tokens(1, 8)})

    assert [answer["num_labels"] for answer in answers] == [4, 3]


def test_row_67_all_tokens_of_all_ranks_may_go_to_one_rank(pool: Pools) -> None:
    answers = pool(2).run("dispatch_to_one_rank")

    for answer in answers:
        torch.testing.assert_close(answer["out"], answer["want"], rtol=0, atol=0)
        torch.testing.assert_close(answer["grad_z"], answer["want_grad_z"], rtol=0, atol=0)
        torch.testing.assert_close(answer["grad_weights"], answer["want_grad_weights"], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["ep2", "fsdp2_ep2", "sp2_ep4_fsdp2"])
def test_rows_26_28_checkpoint_tensors_are_global_and_unpermuted(pool: Pools, name: str) -> None:
    layout = LAYOUTS[name]

    differing = pool(layout.world_size).run("state_against_whole", layout=layout)

    assert differing == [[]] * layout.world_size


def test_row_68_f08_kept_parameters_are_float32_under_fsdp_with_bf16(pool: Pools) -> None:
    answers = pool(2).run("step", layout=FSDP2, batch=dense(), dtype=torch.bfloat16)

    kept = {name for name, dtype in answers[0]["dtypes"].items() if dtype == torch.float32}
    assert {name.rsplit(".", 2)[-2] for name in kept} == {"decay", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm"}
    gradients = answers[0]["gradients"]
    assert all(gradients[name].dtype == answers[0]["dtypes"][name] for name in gradients)


def test_row_38_clipping_scales_by_the_one_norm(pool: Pools, single: Callable[..., Step]) -> None:
    want = single("dense")
    limit = want["norm"].item() / 4

    answers = pool(2).run("step", layout=LAYOUTS["fsdp2_ep2"], batch=dense(), max_norm=limit)

    gradients = answers[0]["gradients"]
    clipped = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
    # 1e-6 is added to the norm before it divides.
    assert clipped.item() == pytest.approx(limit, rel=1e-5)
    torch.testing.assert_close(answers[1]["norm"].double(), want["norm"], rtol=1e-9, atol=0)


def test_a_rank_without_gradients_joins_the_norm(pool: Pools) -> None:
    norms = pool(2).run("norm_without_gradients", layout=FSDP2)

    assert norms == [0.0, 0.0]


def test_row_36_f01_pieces_of_a_batch_under_one_count_are_the_whole_batch(
    pool: Pools, single: Callable[..., Step]
) -> None:
    answers = pool(2).run("accumulated_step", layout=EP2, batch=dense(), num_pieces=2)

    want = single("dense")
    assert sum(answer["loss"] for answer in answers).item() / 2 == pytest.approx(want["loss"].item(), rel=1e-12)
    for name, gradient in want["gradients"].items():
        torch.testing.assert_close(answers[0]["gradients"][name], gradient, **TOLERANCE)
