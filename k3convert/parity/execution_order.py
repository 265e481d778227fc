"""The order in which one step makes its tensors, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping

from k3convert.parity.records import Entry, Kind

# The order in which a step makes the kinds; gradients of parameters come with those of their modules' outputs.
_FORWARD = (Kind.INPUT, Kind.ROUTING_SCORES, Kind.ROUTED_EXPERTS, Kind.OUTPUT)
_AFTER_FORWARD = (Kind.LOGITS, Kind.TOKEN_LOSS, Kind.LOSS)
_BACKWARD = (Kind.OUTPUT_GRADIENT, Kind.PARAMETER_GRADIENT, Kind.INPUT_GRADIENT)
_LAST = (Kind.GRADIENT_NORM,)
# Everything that only a backward pass makes.
BACKWARD = frozenset((*_BACKWARD, *_LAST))


def in_order(entries: Mapping[tuple[Kind, str], Entry]) -> list[Entry]:
    """Entries in the order in which one step makes them."""
    outputs = {entry.name: entry.order for entry in entries.values() if entry.kind is Kind.OUTPUT}
    gradients = {entry.name: entry.order for entry in entries.values() if entry.kind is Kind.OUTPUT_GRADIENT}

    def place(entry: Entry) -> tuple[int, float, int]:
        if entry.kind is Kind.INPUT:
            return 0, outputs.get(entry.name.partition("#")[0], entry.order), _FORWARD.index(entry.kind)
        if entry.kind in _FORWARD:
            return 0, entry.order, _FORWARD.index(entry.kind)
        if entry.kind in _AFTER_FORWARD:
            return 1, _AFTER_FORWARD.index(entry.kind), 0
        if entry.kind in _LAST:
            return 3, 0, 0
        order: float = entry.order
        if entry.kind is Kind.PARAMETER_GRADIENT:
            order = _order_of_owner(entry.name, gradients)
        return 2, order, _BACKWARD.index(entry.kind)

    return sorted(entries.values(), key=place)


def _order_of_owner(parameter: str, gradients: Mapping[str, int]) -> float:
    """When the gradient of the nearest module around a parameter that has one is made; last without any."""
    module = parameter.rpartition(".")[0]
    while module:
        if module in gradients:
            return gradients[module]
        module = module.rpartition(".")[0]
    return float("inf")
