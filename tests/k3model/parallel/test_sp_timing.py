"""Timing of KDA layers under sequence parallelism: what it writes, and that it costs nothing when it is off."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3model.parallel import timing
from k3model.parallel.layout import Layout
from k3model.parallel.timing import KdaTiming

Pools = Callable[[int], Any]

ON = {"K3_KDA_SP_TIMING": "1"}
PHASES = {"project", "gather", "conv", "kernel", "scatter", "output"}


@pytest.mark.parametrize(
    ("layout", "gathers"),
    [(Layout(sp=2), False), (Layout(sp=2), True), (Layout(cp=2, sp=2), False)],
    ids=["sp2", "sp2_gathered", "cp2_sp2"],
)
def test_row_33_rank_0_writes_one_notice_and_a_line_of_json_a_layer(pool: Pools, layout: Layout, gathers: bool) -> None:
    variables = ON | ({"K3_KDA_HEAD_SHARD": "0"} if gathers else {})

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
        pool(2).run("written_forward", layout=Layout(sp=2), variables=ON, forbids_timing=True)


def test_row_33_a_line_has_the_time_of_every_phase_and_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 3.0, 4.0, 8.0, 9.0, 10.0, 11.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    lines: list[str] = []
    measure = KdaTiming("layer 7", 0, "cpu", lines.append)

    with measure("layer"):
        for phase in ("conv", "kernel", "conv"):
            with measure(phase):
                pass

    assert [json.loads(line) for line in lines] == [
        {
            "kda_sp_timing": {
                "layer": "layer 7",
                "rank": 0,
                "ms": {"conv": 3000.0, "kernel": 4000.0, "layer": 11000.0},
            }
        }
    ]


def test_row_33_each_line_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(float(tick) for tick in range(8))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    lines: list[str] = []
    measure = KdaTiming("layer 7", 0, "cpu", lines.append)

    for _ in range(2):
        with measure("layer"), measure("conv"):
            pass

    assert lines[0] == lines[1]


@pytest.mark.parametrize(("device_type", "num_waits"), [("cpu", 0), ("cuda", 2)])
def test_row_33_the_device_is_waited_for_at_both_ends_of_a_phase(
    monkeypatch: pytest.MonkeyPatch, device_type: str, num_waits: int
) -> None:
    waits: list[None] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(None))

    with KdaTiming("layer 7", 1, device_type, None)("conv"):
        pass

    assert len(waits) == num_waits
