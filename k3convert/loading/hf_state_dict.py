"""Native parameters or gradients under the names and in the shapes of the release."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from k3convert.mapping.k3 import K3
from k3model.census import census
from k3model.config import KimiK3Config


def to_hf_state_dict(native: Mapping[str, Tensor], config: KimiK3Config) -> dict[str, Tensor]:
    """Map native tensors to HF names and shapes; dtypes and devices stay.

    Stacked experts come apart (as views, no copies), ``A_log`` is padded with zeros to a multiple of 128, and the
    holder of the decay parameters falls away.

    Args:
        native: parameters, buffers or gradients by FQN; any subset of the network's.
        config: the network's.

    Raises:
        ValueError: names that the network does not have, or shapes that do not fit it; all of them are listed.
    """
    shapes = {spec.name: spec.shapes for spec in census(config, packed=False)}
    mapped: dict[str, Tensor] = {}
    offenders: list[str] = []
    for fqn, tensor in native.items():
        for name, value in _parts(fqn, tensor):
            wanted = shapes.get(name)
            if wanted is None and not _is_tied_head(name, config):
                offenders.append(f"{fqn} has no released name (it would be {name})")
            elif wanted is not None and tuple(value.shape) not in wanted:
                offenders.append(f"{fqn}: {name} would have shape {list(value.shape)}, not {list(wanted[0])}")
            else:
                mapped[name] = value if wanted is None else _stored_form(value, wanted[0])
    if offenders:
        raise ValueError(f"{len(offenders)} of {len(native)} tensors do not fit: {'; '.join(offenders[:3])}")
    return mapped


def _parts(fqn: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    if K3.is_stack(fqn):
        return [(K3.to_hf(fqn, expert), tensor[expert]) for expert in range(tensor.shape[0])]
    return [(K3.to_hf(fqn), tensor)]


def _is_tied_head(name: str, config: KimiK3Config) -> bool:
    return config.text.tie_word_embeddings and name == "language_model.lm_head.weight"


def _stored_form(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(value.shape) == shape:
        return value
    if len(shape) == 1:
        return torch.nn.functional.pad(value, (0, shape[0] - value.shape[0]))
    return value.view(shape)
