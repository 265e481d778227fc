"""``load_model``: a checkpoint of any form as the native network."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from k3convert.checkpoint.hub import resolve_source
from k3convert.loading.checked_source import open_checked
from k3convert.loading.filling import fill
from k3convert.loading.tensor_reader import CHUNK_BYTES
from k3model.network import KimiK3ForConditionalGeneration

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load used and what it did not.

    Attributes:
        num_tensors: tensors read, under released names; a packed pair is one.
        dropped: tensors of layers beyond ``num_layers``.
        left_out: what a DCP holds beside the network: a training run's state.
        unknown_keys: fields of the config that nobody reads.
    """

    num_tensors: int
    dropped: tuple[str, ...]
    left_out: tuple[str, ...]
    unknown_keys: tuple[str, ...]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    ops: Mapping[str, str] | None = None,
    num_layers: int | None = None,
) -> KimiK3ForConditionalGeneration:
    """Load a checkpoint into the native network. Needs its config and weights, nothing else.

    The network is laid out without memory, then allocated on ``device`` and filled tensor by tensor, so the peak is
    the network and one chunk of 64 MiB. Decay parameters, convolutions, head norms and correction biases are float32
    whatever ``dtype`` says.

    Args:
        path: a folder, or the hub id of a snapshot in the local cache. HF with packed or plain experts, BF16 or FP32,
            indexed or one file; or a DCP of this tool, packed or bf16.
        dtype: of the other parameters; None takes the config's.
        device: where the network goes.
        ops: which implementation each op uses, by config field; eager where nothing is said.
        num_layers: read only the first layers.

    Raises:
        UsageError: no such folder or snapshot, or no such number of layers.
        BadInput: one of its kinds; every offender is named. No tensor of the file is ignored, none of the network
            keeps what was in memory.
        KeyError, RuntimeError: an implementation is unknown or not usable here.
    """
    network, _ = load_with_report(path, dtype=dtype, device=device, ops=ops, num_layers=num_layers)
    return network


def load_with_report(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    ops: Mapping[str, str] | None = None,
    num_layers: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[KimiK3ForConditionalGeneration, LoadReport]:
    """As ``load_model``, and what was read and what was not."""
    source = open_checked(resolve_source(str(path), download=False), num_layers=num_layers)
    config = source.config
    network = KimiK3ForConditionalGeneration.empty(
        config, dtype=getattr(torch, config.dtype) if dtype is None else dtype, device=device, ops=ops
    )
    num_tensors = fill(network.state_dict(), source, chunk_bytes=chunk_bytes)
    for key in config.unknown_keys:
        _log.warning("%s: config.json has the unknown field %s", path, key)
    if source.left_out:
        _log.warning("%s: %d entries are no part of the network: %s", path, len(source.left_out), source.left_out)
    return network, LoadReport(num_tensors, source.dropped, source.left_out, config.unknown_keys)
