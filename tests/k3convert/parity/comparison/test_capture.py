"""Captures: what they keep, what they are compared with, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3convert.errors import BadInput
from k3convert.parity.capture import (
    JSON_NAME,
    VALUES_NAME,
    BadCapture,
    Capture,
    CaptureMismatch,
    Identity,
    moments_of,
    read_capture,
    write_capture,
)
from k3convert.parity.capture_comparison import compare_with_capture
from k3convert.parity.cells import parse_cell
from k3convert.parity.comparison import CellComparison, Verdict, compare
from k3convert.parity.expectation import FORWARD, Expectation
from k3convert.parity.measure import tensor_digest
from k3convert.parity.records import Entry, Kind, Run
from k3convert.parity.sampling import SAMPLES, sample, sampled_shape

MakeRun = Callable[..., Run]
Q_PROJ = "language_model.model.layers.{}.self_attn.q_proj"
GATE = "language_model.model.layers.{}.block_sparse_moe.gate"
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "noise": 3e-3}
ANYTHING = Expectation(frozenset(), "another machine")
IDENTITY = Identity(
    weights_digest="ab" * 32, inputs_digest="cd" * 32, seed=0, rows=2, tokens=32, num_layers=None,
    cell="sp=2,dtype=bf16,data=dense",
)  # fmt: skip


def carry(run: Run, folder: Path) -> Capture:
    write_capture(run, folder, IDENTITY, {"device": "imaginary"})
    return read_capture(folder)


@pytest.fixture
def judge(make_run: MakeRun, tmp_path: Path) -> Callable[..., CellComparison]:
    """Compare the capture of an imaginary bf16 candidate with the references of this machine."""

    def run(expectation: Expectation = ANYTHING, **candidate: Any) -> CellComparison:
        golden, baseline = make_run(dtype=torch.float64), make_run(**BF16)
        capture = carry(make_run(**(BF16 | candidate)), tmp_path / "capture")
        return compare_with_capture(golden, baseline, capture, IDENTITY, expectation)

    return run


def test_a_capture_is_like_its_run_but_for_values_it_left_out(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(**BF16, ranks=2)

    capture = carry(run, tmp_path / "capture")
    assert capture.identity == IDENTITY
    assert capture.environment == {"device": "imaginary"}
    assert capture.entries == run.entries
    for key, entry in run.entries.items():
        whole = run.tensor(*key)
        assert capture.digests[key] == tensor_digest(whole)
        assert torch.equal(capture.tensor(*key), sample(entry, whole))
        assert capture.tensor(*key).dtype == whole.dtype
        if whole.is_floating_point():
            assert capture.moments[key] == moments_of(whole)


def test_the_same_run_elsewhere_is_bitwise(judge: Callable[..., CellComparison]) -> None:
    found = judge(Expectation(FORWARD, "the same machine"))

    assert found.verdict is Verdict.BITWISE
    assert found.num_bitwise == len(found.tensors)
    assert str(found.cell) == IDENTITY.cell


def test_an_equally_good_run_elsewhere_is_within_tolerance(judge: Callable[..., CellComparison]) -> None:
    found = judge(seed=1)

    assert found.verdict is Verdict.WITHIN_TOLERANCE
    assert found.logits is not None
    assert found.logits.num_tokens == 64
    assert found.scalars
    assert found.routing.layers


def test_a_run_three_times_as_bad_elsewhere_is_different(judge: Callable[..., CellComparison]) -> None:
    found = judge(seed=1, noise=9e-3)

    assert found.verdict is Verdict.DIFFERENT
    assert found.first_outside is not None
    assert found.first_outside.name == Q_PROJ.format(0)


def test_samples_and_whole_tensors_tell_the_same_story(make_run: MakeRun, judge: Callable[..., CellComparison]) -> None:
    golden, baseline, candidate = make_run(dtype=torch.float64), make_run(**BF16), make_run(**(BF16 | {"seed": 1}))
    whole = compare(parse_cell("sp=2,dtype=bf16"), golden, baseline, candidate, ANYTHING)

    sampled = judge(seed=1)
    ratios = {pool.key: pool.totals.rms_ratio for pool in whole.pools if pool.totals.num_values >= 1000}
    for pool in sampled.pools:
        if pool.key in ratios:
            # 256 values or more: the ratio of two sample deviations is known to 4 / sqrt(2 * 256)
            assert pool.totals.rms_ratio == pytest.approx(ratios[pool.key], rel=0.18)


def test_a_bit_that_the_samples_miss_shows_in_the_digest(judge: Callable[..., CellComparison]) -> None:
    name = Q_PROJ.format(1)
    entry = Entry(Kind.OUTPUT, name, 0, "", 1, "", "bfloat16", (2, 32, 24))
    places = sample(entry, torch.arange(2 * 32 * 24).view(2, 32, 24))
    missed = next(place for place in range(2 * 32 * 24) if place not in set(places.tolist()))

    def change(value: Tensor) -> Tensor:
        out = value.flatten().clone()
        out[missed] *= 1 + 2**-7
        return out.view_as(value)

    found = judge(Expectation(FORWARD, "rows"), changes={(Kind.OUTPUT, name): change})
    assert found.verdict is Verdict.DIFFERENT
    assert found.first_outside is not None
    assert found.first_outside.name == name
    assert found.tensor(Kind.OUTPUT, name).measure.difference.num_different == 0


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (1e4, "of all values")])
def test_what_the_samples_miss_shows_in_the_moments(
    judge: Callable[..., CellComparison], value: float, word: str
) -> None:
    name = Q_PROJ.format(1)
    entry = Entry(Kind.OUTPUT, name, 0, "", 1, "", "bfloat16", (2, 32, 24))
    places = set(sample(entry, torch.arange(2 * 32 * 24).view(2, 32, 24)).tolist())
    missed = next(place for place in range(2 * 32 * 24) if place not in places)

    def change(tensor: Tensor) -> Tensor:
        out = tensor.flatten().clone()
        out[missed] = value
        return out.view_as(tensor)

    found = judge(seed=1, changes={(Kind.OUTPUT, name): change})
    assert found.verdict is Verdict.DIFFERENT
    assert [fault.name for fault in found.faults] == [name]
    assert word in found.faults[0].reason
    assert found.first_outside is not None
    assert found.first_outside.name == name


def test_routing_of_a_capture_is_compared(judge: Callable[..., CellComparison]) -> None:
    found = judge(changes={(Kind.ROUTED_EXPERTS, GATE.format(2)): lambda value: (value + 1) % 8})

    assert found.verdict is Verdict.DIFFERENT
    assert found.first_outside is not None
    assert found.first_outside.name == GATE.format(2)
    assert found.routing.num_flips == 64


@pytest.mark.parametrize(
    ("field", "value"),
    [("weights_digest", "ef" * 32), ("inputs_digest", "ef" * 32), ("seed", 1), ("rows", 4), ("tokens", 64),
     ("num_layers", 3), ("cell", "sp=2,dtype=fp32,data=dense"), ("routing", "forced")],
)  # fmt: skip
def test_a_capture_of_something_else_is_refused(make_run: MakeRun, tmp_path: Path, field: str, value: object) -> None:
    run = make_run()
    capture = carry(run, tmp_path / "capture")

    with pytest.raises(CaptureMismatch) as caught:
        compare_with_capture(run, run, capture, IDENTITY.model_copy(update={field: value}), ANYTHING)
    assert len(caught.value.offenders) == 1
    assert field in caught.value.offenders[0]
    assert str(value) in caught.value.offenders[0]


def spoil_json(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        document = json.loads((folder / JSON_NAME).read_text())
        change(document)
        (folder / JSON_NAME).write_text(json.dumps(document))

    return spoil


def spoil_values(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        values = load_file(folder / VALUES_NAME)
        change(values)
        save_file(values, folder / VALUES_NAME)

    return spoil


HOSTILE: dict[str, Callable[[Path], None]] = {
    "no files": lambda folder: (folder / JSON_NAME).unlink(),
    "no values": lambda folder: (folder / VALUES_NAME).unlink(),
    "cut": lambda folder: (folder / VALUES_NAME).write_bytes((folder / VALUES_NAME).read_bytes()[:-9]),
    "not json": lambda folder: (folder / JSON_NAME).write_text("{"),
    "deep": lambda folder: (folder / JSON_NAME).write_text("[" * 200_000),
    "a list": lambda folder: (folder / JSON_NAME).write_text("[]"),
    "another version": spoil_json(lambda d: d.update(schema_version=2)),
    "an unknown field": spoil_json(lambda d: d.update(code="import os")),
    "an unknown kind": spoil_json(lambda d: d["tensors"][0].update(kind="pickle")),
    "an unknown dtype": spoil_json(lambda d: d["tensors"][0].update(dtype="object")),
    "a negative size": spoil_json(lambda d: d["tensors"][0].update(shape=[-1, 4])),
    "two negative sizes": spoil_json(
        lambda d: next(t for t in d["tensors"] if t["shape"] == [24, 24]).update(shape=[-24, -24])
    ),
    "a huge size": spoil_json(lambda d: d["tensors"][0].update(shape=[1 << 62, 1 << 62])),
    "many dims": spoil_json(lambda d: d["tensors"][0].update(shape=[1] * 9)),
    "a bad digest": spoil_json(lambda d: d["tensors"][0].update(digest="../../etc")),
    "a tensor twice": spoil_json(lambda d: d["tensors"].append(d["tensors"][0])),
    "a tensor less": spoil_json(lambda d: d["tensors"].pop()),
    "samples of another shape": spoil_values(lambda v: v.update({"0": v["0"][:-1].clone()})),
    "samples of another dtype": spoil_values(lambda v: v.update({"1": v["1"].double()})),
    "samples of nothing": spoil_values(lambda v: v.update({"../x": torch.zeros(2)})),
}  # fmt: skip


@pytest.mark.parametrize("spoil", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_or_hostile_capture_is_refused_as_bad_input(
    make_run: MakeRun, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "capture"
    carry(make_run(**BF16), folder)
    spoil(folder)

    with pytest.raises(BadInput):
        read_capture(folder)


def test_names_of_a_capture_are_data(make_run: MakeRun, tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    run = make_run(**BF16)
    carry(run, folder)
    name = "../../../<script>"
    spoil_json(lambda d: d["tensors"][0].update(name=name))(folder)

    capture = read_capture(folder)  # the samples of a name have as many values whatever it is
    found = compare_with_capture(run, run, capture, IDENTITY, ANYTHING)
    assert found.verdict is Verdict.DIFFERENT
    assert name in {fault.name for fault in found.faults}
    assert list(tmp_path.rglob("*script*")) == []


def test_every_fault_of_a_capture_is_listed(make_run: MakeRun, tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    carry(make_run(**BF16), folder)
    spoil_values(lambda v: v.update({"0": torch.zeros(1), "1": torch.zeros(1)}))(folder)

    with pytest.raises(BadCapture) as caught:
        read_capture(folder)
    assert len(caught.value.offenders) == 2


GOLDEN_PLACES = [8, 14, 21, 34, 45, 60]


def entry_of(kind: Kind, shape: tuple[int, ...], name: str = "x") -> Entry:
    return Entry(kind, name, 0, "", None, "", "float32", shape)


def test_samples_are_distinct_ordered_and_spread() -> None:
    entry = entry_of(Kind.OUTPUT, (7, 11, 131))
    total = 7 * 11 * 131

    places = sample(entry, torch.arange(total).view(entry.shape))
    assert len(places) == SAMPLES
    assert bool((places.diff() > 0).all())
    parts = torch.tensor([number * total // SAMPLES for number in range(SAMPLES + 1)])
    assert bool(((places >= parts[:-1]) & (places < parts[1:])).all())


def test_samples_follow_from_kind_name_and_shape_alone() -> None:
    value = torch.arange(20 * 131).view(20, 131)

    def places(kind: Kind = Kind.OUTPUT, name: str = "a", shape: tuple[int, ...] = (20, 131)) -> list[int]:
        return sample(entry_of(kind, shape, name), value.view(shape)).tolist()

    assert places() == places()
    assert places() != places(name="b")
    assert places() != places(kind=Kind.OUTPUT_GRADIENT)
    assert places() != places(shape=(131, 20))
    # what captures that exist were made with
    assert places()[:6] == GOLDEN_PLACES


def test_small_tensors_are_kept_whole() -> None:
    for shape in ((), (0,), (3,), (SAMPLES,)):
        value = torch.randn(shape)
        assert torch.equal(sample(entry_of(Kind.OUTPUT, shape), value), value.reshape(-1))


def test_logits_are_kept_by_whole_tokens_and_routes_from_the_first_token_on() -> None:
    logits = entry_of(Kind.LOGITS, (4, 4096, 163_840), "logits")
    assert sampled_shape(logits) == (8, 163_840)
    routed = entry_of(Kind.ROUTED_EXPERTS, (4, 4096, 16))
    assert sampled_shape(routed) == (4, 256, 16)

    small = entry_of(Kind.LOGITS, (2, 3, 5), "logits")
    value = torch.randn(2, 3, 5)
    assert torch.equal(sample(small, value), value.view(6, 5))


def test_a_capture_of_the_released_network_is_bounded() -> None:
    """93 layers of some 30 modules, forward and backward, and as many parameters; half of it bf16."""
    tensors = [entry_of(Kind.OUTPUT, (1, 4096, 7168))] * 93 * 30 * 3
    routers = [entry_of(Kind.ROUTED_EXPERTS, (1, 4096, 16))] * 92
    logits = entry_of(Kind.LOGITS, (1, 4096, 163_840))

    num_values = sum(torch.Size(sampled_shape(each)).numel() for each in (*tensors, *routers, logits))
    assert num_values * 4 < 32 << 20


def test_a_capture_of_a_small_network_has_about_a_kilobyte_a_tensor(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(**BF16)
    carry(run, tmp_path / "capture")

    nbytes = sum(path.stat().st_size for path in (tmp_path / "capture").iterdir())
    assert nbytes < 2048 * len(run.entries)


def test_moments_are_of_finite_values() -> None:
    value = torch.tensor([3.0, -4.0, float("nan"), float("inf"), -float("inf"), 0.0, 0.0])

    found = moments_of(value)
    assert (found.mean, found.abs_max, found.num_nan, found.num_infinite) == (-0.25, 4.0, 1, 2)
    assert found.rms == 2.5


def test_an_entry_of_another_shape_is_a_fault_and_no_crash(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(**BF16)
    capture = carry(run, tmp_path / "capture")
    key = (Kind.OUTPUT, Q_PROJ.format(0))
    wider = replace(capture.entries[key], shape=(2, 32, 25))
    other = replace(capture, entries=capture.entries | {key: wider})

    found = compare_with_capture(run, run, other, IDENTITY, ANYTHING)
    assert found.verdict is Verdict.DIFFERENT
    assert found.faults[0].name == key[1]
