"""The timer of a KDA layer's phases by itself; ``test_sp.py`` has it in a network."""

from __future__ import annotations

import json

import pytest
import torch

from k3model.parallel import timing
from k3model.parallel.timing import KdaTiming


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
