"""Lines of metrics survive being written, cut short and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3convert.training.metrics import ExpertLoad, MetricsLog, Speed

from .builders import step, steps

LOAD = ExpertLoad(2.0, 1, (2.0, 1.5))


def test_the_log_reads_as_what_was_added(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for metrics in (step(1, 6.0, expert_load=LOAD), step(2, float("nan"), nonfinite="x")):
        log.add(metrics)

    read = MetricsLog.read(tmp_path).steps

    assert read[0] == log.steps[0]
    assert repr(read[1]) == repr(log.steps[1])


def test_a_resumed_log_ends_with_the_step_that_it_goes_on_from(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for metrics in steps([6.0, 5.0, 4.0, 3.0]):
        log.add(metrics)
    with log.path.open("a") as file:
        file.write('{"step": 5, "lo')

    resumed = MetricsLog.resumed(tmp_path, 2)
    resumed.add(step(3, 1.0))

    assert [metrics.loss for metrics in MetricsLog.read(tmp_path).steps] == [6.0, 5.0, 1.0]


def test_expert_load_is_the_busiest_layers() -> None:
    load = ExpertLoad.of([[4, 4, 4, 4], [13, 3, 0, 0]])

    assert load == ExpertLoad(3.25, 2, (1.0, 3.25))


@pytest.mark.parametrize("counts", [[], [[0, 0]]])
def test_without_experts_or_tokens_there_is_no_load(counts: list[list[int]]) -> None:
    assert ExpertLoad.of(counts) is None


def test_speed_leaves_the_first_step_out() -> None:
    run = [step(1, 6.0, step_s=100.0), *(step(number, 5.0, step_s=0.5) for number in range(2, 22))]

    assert Speed.of(run) == Speed(0.5, 0.5, 256.0)


def test_the_line_of_a_step_names_what_to_watch() -> None:
    line = step(7, 2.5, expert_load=LOAD).line(40)

    assert line == (
        "step  7/40  loss 2.5000  norm 1  rate 1.00e-03  256 tokens/s  0.50 s  1.00 GiB  busiest expert 2.0x"
    )
