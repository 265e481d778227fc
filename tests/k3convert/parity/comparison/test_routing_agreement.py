"""Flips of routing: which are noise, which are not, and which follow from others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k3convert.parity.cells import parse_cell
from k3convert.parity.comparison import Verdict, compare
from k3convert.parity.expectation import FORWARD, Expectation
from k3convert.parity.records import Kind, Run
from k3convert.parity.routing_agreement import RoutingAgreement, compare_routing

MakeRun = Callable[..., Run]
GATE = "language_model.model.layers.{}.block_sparse_moe.gate"
ROWS, TOKENS, EXPERTS, TOP = 2, 32, 8, 2
CLEAR = torch.arange(EXPERTS, dtype=torch.float64) / 10  # margins of 0.1: far beyond noise of 1e-3


def scores(near: dict[tuple[int, int], float]) -> Tensor:
    """Clear scores, but for tokens whose second choice is ahead of the third by the amount given."""
    out = CLEAR.expand(ROWS, TOKENS, EXPERTS).clone()
    for (row, position), margin in near.items():
        out[row, position, EXPERTS - TOP - 1] = out[row, position, EXPERTS - TOP] - margin
    return out


def chosen(flipped: set[tuple[int, int]]) -> Tensor:
    """The two best experts, but for tokens that take the third instead of the second."""
    out = torch.tensor([EXPERTS - 2, EXPERTS - 1]).expand(ROWS, TOKENS, TOP).clone()
    for row, position in flipped:
        out[row, position] = torch.tensor([EXPERTS - 3, EXPERTS - 1])
    return out


@pytest.fixture
def route(make_run: MakeRun) -> Callable[..., RoutingAgreement]:
    """Compare a candidate with flips by layer; the baseline's scores are 1e-3 from the golden ones."""

    def run(near: dict[int, dict[tuple[int, int], float]], flips: dict[int, set[tuple[int, int]]]) -> RoutingAgreement:
        runs = []
        for which in ("golden", "baseline", "candidate"):
            changes = {}
            for layer in range(4):
                value = scores(near.get(layer, {})) + (0 if which == "golden" else 1e-3)
                flipped = flips.get(layer, set()) if which == "candidate" else set()
                changes[Kind.ROUTING_SCORES, GATE.format(layer)] = lambda _, value=value: value.float()
                changes[Kind.ROUTED_EXPERTS, GATE.format(layer)] = lambda _, flipped=flipped: chosen(flipped)
            runs.append(make_run(changes=changes))
        return compare_routing(*runs)

    return run


def test_equal_choices_agree_and_margins_are_known(route: Callable[..., RoutingAgreement]) -> None:
    found = route({1: {(0, 3): 0.004}}, {})

    assert found.num_flips == found.num_beyond == 0
    assert [layer.layer for layer in found.layers] == [0, 1, 2, 3]
    assert found.layers[1].smallest_margin == pytest.approx(0.004, rel=1e-3)  # scores are float32
    assert found.layers[0].smallest_margin == pytest.approx(0.1, rel=1e-3)
    assert found.layers[0].num_tokens == ROWS * TOKENS
    assert found.layers[0].noise_bound == pytest.approx(6e-3, rel=1e-3)  # six times the baseline's error


def test_a_flip_of_a_small_margin_is_noise(route: Callable[..., RoutingAgreement]) -> None:
    layer = route({1: {(0, 3): 0.005}}, {1: {(0, 3)}}).layers[1]

    assert (layer.num_flips, layer.num_beyond) == (1, 0)
    assert (layer.flips[0].row, layer.flips[0].position) == (0, 3)
    assert (layer.flips[0].left, layer.flips[0].joined) == ((6,), (5,))
    assert not layer.flips[0].is_beyond


def test_a_flip_of_a_large_margin_is_not(route: Callable[..., RoutingAgreement]) -> None:
    found = route({1: {(0, 3): 0.007}}, {1: {(0, 3)}})

    assert found.num_beyond == 1
    assert found.first_beyond is not None
    assert found.first_beyond.layer == 1
    assert found.layers[1].flips[0].is_beyond


def test_flips_behind_an_earlier_layers_flip_follow_from_it(route: Callable[..., RoutingAgreement]) -> None:
    found = route({0: {(0, 10): 0.001}}, {0: {(0, 10)}, 2: {(0, 9), (0, 10), (0, 20), (1, 15)}})

    layer = found.layers[2]
    assert (layer.num_flips, layer.num_following, layer.num_beyond) == (4, 2, 2)
    assert {(flip.row, flip.position) for flip in layer.flips} == {(0, 9), (1, 15)}


def test_flips_of_one_layer_do_not_excuse_each_other(route: Callable[..., RoutingAgreement]) -> None:
    layer = route({}, {0: {(0, 1), (0, 2)}}).layers[0]

    assert (layer.num_following, layer.num_beyond) == (0, 2)


def test_the_order_of_experts_is_no_difference(make_run: MakeRun) -> None:
    change = {(Kind.ROUTED_EXPERTS, GATE.format(0)): lambda value: value.flip(-1)}

    assert compare_routing(make_run(), make_run(), make_run(changes=change)).num_flips == 0


def test_a_flip_beyond_noise_makes_the_run_different_and_names_the_router(make_run: MakeRun) -> None:
    other = {(Kind.ROUTED_EXPERTS, GATE.format(2)): lambda value: (value + 1) % EXPERTS}
    golden, baseline, candidate = make_run(dtype=torch.float64), make_run(noise=1e-6), make_run(noise=1e-6, seed=1)
    wrong = make_run(noise=1e-6, seed=1, changes=other)
    cell, anything = parse_cell("ep=2"), Expectation(frozenset(), "any")

    assert compare(cell, golden, baseline, candidate, anything).verdict is Verdict.WITHIN_TOLERANCE
    found = compare(cell, golden, baseline, wrong, anything)
    assert found.verdict is Verdict.DIFFERENT
    assert found.first_outside is not None
    assert found.first_outside.name == GATE.format(2)


def test_any_flip_is_a_fault_where_routing_must_be_equal(make_run: MakeRun) -> None:
    def flip_nearest(value: Tensor) -> Tensor:
        out = value.clone()
        out[0, 0] = torch.tensor([0, 1])
        return out

    golden, baseline = make_run(dtype=torch.float64), make_run(noise=1e-6)
    candidate = make_run(noise=1e-6, changes={(Kind.ROUTED_EXPERTS, GATE.format(0)): flip_nearest})

    found = compare(parse_cell("sp=2"), golden, baseline, candidate, Expectation(FORWARD, "rows"))
    assert found.verdict is Verdict.DIFFERENT
    assert found.faults[0].kind is Kind.ROUTED_EXPERTS


def test_routing_is_read_from_the_free_runs_where_they_are_given(make_run: MakeRun) -> None:
    other = {(Kind.ROUTED_EXPERTS, GATE.format(2)): lambda value: (value + 1) % EXPERTS}
    golden, baseline = make_run(dtype=torch.float64), make_run(noise=1e-6)
    forced, free = make_run(noise=1e-6), make_run(noise=1e-6, changes=other)

    found = compare(
        parse_cell("ep=2"), golden, baseline, forced, Expectation(frozenset(), "any"),
        free_runs=(golden, baseline, free),
    )  # fmt: skip
    assert found.routing.num_flips == ROWS * TOKENS
    assert found.verdict is Verdict.DIFFERENT


def test_a_network_without_routers_agrees(make_run: MakeRun) -> None:
    kinds = (Kind.ROUTED_EXPERTS, Kind.ROUTING_SCORES)
    none = frozenset((kind, GATE.format(layer)) for kind in kinds for layer in range(4))
    run = make_run(without=none)

    assert compare_routing(run, run, run).layers == ()
