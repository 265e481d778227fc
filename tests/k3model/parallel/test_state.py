"""What one layout saves through torch DCP, every other loads: weights, moments, and with them the next loss."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from k3model.parallel.layout import Layout

Answers = list[dict[str, Any]]
Run = Callable[..., Answers]

LAYOUTS = {
    "one": Layout(),
    "fsdp2": Layout(dp=2, shards_parameters=True),
    "ep2": Layout(dp=2, ep=2),
    "ep2_fsdp4": Layout(dp=4, ep=2, shards_parameters=True),
    "sp2": Layout(sp=2),
    "pp2": Layout(pp=2),
}
# Every layout saves once and loads once; the other pairs are slow.
CYCLE = tuple(zip(LAYOUTS, [*list(LAYOUTS)[1:], "one"], strict=True))
PAIRS = [
    pytest.param(*pair, id=" to ".join(pair), marks=() if pair in CYCLE else pytest.mark.slow)
    for pair in product(LAYOUTS, LAYOUTS)
]

MODEL = {"fields": {"attn_res_block_size": 2}, "num_layers": 3}


def rows() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 500, (4, 8), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "labels": ids}


def of_all_ranks(answers: Answers, part: str) -> dict[str, str]:
    """Digests by name; ranks that hold the same name agree."""
    merged: dict[str, str] = {}
    for answer in answers:
        assert {name: merged[name] for name in merged.keys() & answer[part].keys()}.items() <= answer[part].items()
        merged |= answer[part]
    return merged


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Run], tuple[Path, Answers]]:
    """The checkpoint of a layout, written once, and what its ranks said of it."""
    found: dict[str, tuple[Path, Answers]] = {}

    def get(name: str, run: Run) -> tuple[Path, Answers]:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            found[name] = folder, run("save", LAYOUTS[name], rows=rows(), folder=folder, model=MODEL)
        return found[name]

    return get


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_rows_26_28_weights_and_moments_load_under_another_layout_to_the_bit(
    run: Run, saved: Callable[[str, Run], tuple[Path, Answers]], source: str, target: str
) -> None:
    folder, wrote = saved(source, run)

    read = run("load", LAYOUTS[target], rows=rows(), folder=folder, model=MODEL)

    for part in ("model", "optimizer"):
        assert of_all_ranks(read, part) == of_all_ranks(wrote, part)
    # float64: matrix products have other numbers of rows, and sums run in another order
    tolerance = 0.0 if source == target else 1e-12
    torch.testing.assert_close(read[0]["loss"], wrote[0]["loss"], rtol=tolerance, atol=0)


@pytest.mark.slow
def test_row_28_eight_ranks_save_experts_that_other_splits_of_them_load(run: Run, tmp_path: Path) -> None:
    model = {"num_layers": 2}
    batch = {name: torch.cat((ids, ids)) for name, ids in rows().items()}
    wrote = run("save", Layout(dp=8, ep=4, shards_parameters=True), rows=batch, folder=tmp_path, model=model)

    for ep in (2, 8, 1):
        layout = Layout(dp=8, ep=ep, shards_parameters=True)
        read = run("load", layout, rows=batch, folder=tmp_path, model=model)

        for part in ("model", "optimizer"):
            assert of_all_ranks(read, part) == of_all_ranks(wrote, part)


@pytest.mark.parametrize(
    ("num_rows", "loaders"),
    [(6, (2, 1)), (7, (2, 1)), (17, (2, 1)), pytest.param(6, (3, 8), marks=pytest.mark.slow)],
)
def test_c7_c8_rows_that_the_ranks_do_not_divide_load_on_fewer_and_on_more(
    run: Run, tmp_path: Path, num_rows: int, loaders: tuple[int, ...]
) -> None:
    def on(dp: int, *, saves: bool) -> Answers:
        layout = Layout(dp=dp, shards_parameters=True)
        return run("uneven_rows", layout, num_rows=num_rows, folder=tmp_path, saves=saves)

    wrote = on(4, saves=True)

    for dp in loaders:
        assert on(dp, saves=False) == [wrote[0]] * dp


def test_a_new_optimizer_gets_its_first_state_without_a_step(run: Run) -> None:
    (found,) = run("begin_optimizer", LAYOUTS["one"])

    assert found["unchanged"]
    assert list(found["steps"]) == [f"{name}.step" for name in found["stepped"]]
    assert found["gradients"] == found["stepped"]
    assert found["lr"] == 1e-2


def test_row_28_experts_cut_along_one_dim_by_two_axes_are_refused(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"would permute their blocks: \['language_model.*experts.w1'\]"):
        run("doubly_cut", LAYOUTS["ep2_fsdp4"])


def test_an_optimizer_of_another_network_is_refused(run: Run) -> None:
    with pytest.raises(RuntimeError, match="2 of the optimizer's 2 parameters are not the network's"):
        run("foreign_optimizer", LAYOUTS["one"])
