"""Where a difference begins: the first module that differs is run again, on the reference's inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from k3convert.parity.records import Entry, Kind, ReplicasDiffer, Run
from k3convert.parity.run_pools import RunPools
from k3convert.parity.run_spec import RunSpec

HEAD = "language_model.lm_head"
_INSIDE_LAYERS = "language_model.model.layers."
# The kinds that a module's own run is judged by, in the order in which they are made.
_FORWARD_KINDS = (Kind.OUTPUT, Kind.ROUTED_EXPERTS, Kind.ROUTING_SCORES)
_BACKWARD_KINDS = (Kind.OUTPUT_GRADIENT, Kind.INPUT_GRADIENT, Kind.PARAMETER_GRADIENT)


class Origin(StrEnum):
    """Where a difference comes from, as far as the second run says."""

    MODULE = "module"
    OUTSIDE = "outside"
    NOT_A_MODULE = "not a module"


@dataclass(frozen=True, slots=True)
class IsolatedDifference:
    """A tensor of the module, both sides computed from the reference's inputs.

    Attributes:
        entry: which tensor.
        index: the first element that differs, in the global tensor.
        reference: its value in the reference.
        candidate: its value in the candidate.
        num_differing: elements with other bits.
        num_elements: of the tensor.
    """

    entry: Entry
    index: tuple[int, ...]
    reference: float
    candidate: float
    num_differing: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of a cell.

    Attributes:
        first: the first tensor that differs, in the order of execution.
        module: the module that was run again; empty where none was.
        origin: whether the module itself differs.
        differences: of the module and what it contains, in order; empty unless the origin is the module.
    """

    first: Entry
    module: str
    origin: Origin
    differences: tuple[IsolatedDifference, ...] = ()


def find_divergence(pools: RunPools, baseline: RunSpec, candidate: RunSpec, first: Entry) -> Divergence:
    """Run the first differing module again, in the candidate's way, with the baseline's inputs.

    In the backward pass it also gets the gradients of the baseline's outputs, so that nothing but the module itself
    can make a difference.

    Args:
        pools: what runs cells.
        baseline: how the reference was run.
        candidate: how the cell was run.
        first: the first tensor that differs.
    """
    module = _module_of(first)
    if module is None:
        return Divergence(first, "", Origin.NOT_A_MODULE)
    differences = _run_alone(pools, baseline, candidate, module, first)
    # What is not a module of its own, such as an op between two of them, shows in the module around it.
    while not differences and (around := module.rpartition(".")[0]).startswith(_INSIDE_LAYERS):
        module = around
        differences = _run_alone(pools, baseline, candidate, module, first)
    return Divergence(first, module, Origin.MODULE if differences else Origin.OUTSIDE, differences)


def _run_alone(
    pools: RunPools, baseline: RunSpec, candidate: RunSpec, module: str, first: Entry
) -> tuple[IsolatedDifference, ...]:
    chosen = frozenset({module})
    reference = pools.run(replace(baseline, inputs_of=chosen, repeats=1))
    again = pools.run(
        replace(candidate, inputs_of=chosen, substituted=chosen, reference=str(reference.run.folder), repeats=1)
    )
    is_backward = first.kind in _BACKWARD_KINDS
    differences = tuple(_differences(reference.run, again.run, module, is_backward=is_backward))
    pools.forget(reference)
    pools.forget(again)
    return differences


def _module_of(entry: Entry) -> str | None:
    if entry.kind is Kind.LOGITS:
        return HEAD
    if entry.kind is Kind.PARAMETER_GRADIENT:
        return entry.name.rpartition(".")[0]
    return entry.name if entry.kind in (*_FORWARD_KINDS, *_BACKWARD_KINDS) else None


def _differences(reference: Run, again: Run, module: str, *, is_backward: bool) -> Iterator[IsolatedDifference]:
    for kind in _BACKWARD_KINDS if is_backward else _FORWARD_KINDS:
        for entry in reference.of_kind(kind):
            is_inside = entry.name == module or entry.name.startswith((f"{module}.", f"{module}#"))
            if not is_inside or entry.key not in again.entries:
                continue
            try:
                found = _first_difference(reference.tensor(*entry.key), again.tensor(*entry.key))
            except ReplicasDiffer:
                continue  # copies on several ranks are compared where the run is judged
            if found is not None:
                yield IsolatedDifference(entry, *found)


def _first_difference(a: Tensor, b: Tensor) -> tuple[tuple[int, ...], float, float, int, int] | None:
    differs = a.flatten() != b.flatten()
    differs &= ~(torch.isnan(a.flatten()) & torch.isnan(b.flatten()))
    if not bool(differs.any()):
        return None
    flat = int(differs.int().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
    return index, float(a.flatten()[flat]), float(b.flatten()[flat]), int(differs.sum()), a.numel()
