"""The axes of a layout, and the exchanges between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3model.parallel.layout import Layout

Pools = Callable[[int], Any]


def test_row_27_experts_count_the_ranks_of_a_stage_again(pool: Pools) -> None:
    answers = pool(4).run("places", layout=Layout(dp=2, sp=2, ep=2, shards_parameters=True))

    assert [answer["ep"] for answer in answers] == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]
    assert [answer["ep_fsdp"] for answer in answers] == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]
    assert [answer["dp"][0] for answer in answers] == [0, 0, 1, 1]
    assert [answer["sp"][0] for answer in answers] == [0, 1, 0, 1]
    assert all(answer["data"][1] == [0, 1, 2, 3] for answer in answers)


def test_a_layout_of_another_world_size_is_refused(pool: Pools) -> None:
    with pytest.raises(RuntimeError, match="needs 4 ranks, there are 2"):
        pool(2).run("places", layout=Layout(sp=4))


def test_row_29_sequence_and_heads_change_places_bitwise(pool: Pools) -> None:
    x = torch.randn(2, 6, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    answers = pool(2).run("exchange_and_back", x=x)

    for rank, answer in enumerate(answers):
        mine = x.chunk(2, dim=1)[rank]
        assert torch.equal(answer["heads"], x[:, :, 2 * rank : 2 * rank + 2])
        assert torch.equal(answer["back"], mine)
        assert torch.equal(answer["gathered"], x)
        # Every rank sums what it gathered, so each element counts once a rank.
        assert torch.equal(answer["grad"], 2 * mine + 2)
