"""Some values of a tensor, the same ones on every machine: their places follow from kind, name and shape alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3convert.numerics import digest
from k3convert.parity.records import Entry, Kind
from k3convert.parity.routing_agreement import Recorded

# As many as a pool needs, so that every tensor can be judged.
SAMPLES = 256
# Logits come as whole tokens: a divergence needs all of one.
LOGIT_VALUES, FEWEST_LOGIT_TOKENS = 1 << 17, 8
TOKEN_LOSSES = 1 << 16
ROUTED_VALUES = 1 << 14
_GOLDEN_RATIO, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample(entry: Entry, tensor: Tensor) -> Tensor:
    """What a capture keeps of a tensor.

    Returns:
        Of logits ``[tokens, vocabulary]``; of routed experts the first tokens of every row, ``[rows, tokens, k]``; of
        anything else ``[values]``. The whole tensor, flattened, where it is small.
    """
    if entry.kind is Kind.ROUTED_EXPERTS:
        return tensor.narrow(-2, 0, sampled_shape(entry)[-2])
    if entry.kind is Kind.LOGITS:
        rows = tensor.reshape(-1, tensor.shape[-1])
        return rows[_indices(entry, rows.shape[0], sampled_shape(entry)[0])]
    flat = tensor.reshape(-1)
    return flat[_indices(entry, flat.shape[0], sampled_shape(entry)[0])]


def sampled_shape(entry: Entry) -> tuple[int, ...]:
    """The shape of what a capture keeps of a tensor."""
    num_values = math.prod(entry.shape)
    if entry.kind is Kind.ROUTED_EXPERTS and len(entry.shape) >= 2:
        per_token = num_values // max(1, entry.shape[-2])
        tokens = min(entry.shape[-2], max(1, ROUTED_VALUES // max(1, per_token)))
        return (*entry.shape[:-2], tokens, entry.shape[-1])
    if entry.kind is Kind.LOGITS and entry.shape:
        vocabulary = max(1, entry.shape[-1])
        tokens = num_values // vocabulary
        return min(tokens, max(FEWEST_LOGIT_TOKENS, LOGIT_VALUES // vocabulary)), entry.shape[-1]
    return (min(num_values, TOKEN_LOSSES if entry.kind is Kind.TOKEN_LOSS else SAMPLES),)


def _indices(entry: Entry, total: int, wanted: int) -> Tensor:
    """``wanted`` of ``total`` places in ascending order, one from each of as many equal parts."""
    if wanted >= total:
        return torch.arange(total)
    text = f"{entry.kind} {entry.name} {list(entry.shape)}"
    seed = int(digest.digest_hex(text.encode())[:16], 16)
    bounds = np.array([number * total // wanted for number in range(wanted + 1)], dtype=np.uint64)
    sizes = bounds[1:] - bounds[:-1]
    return torch.from_numpy((bounds[:-1] + _mixed(seed, wanted) % sizes).astype(np.int64))


def _mixed(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Random numbers of 64 bits: the SplitMix64 generator of Steele, Lea and Flood (2014)."""
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = np.uint64(seed) + numbers * np.uint64(_GOLDEN_RATIO)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
    return state ^ (state >> np.uint64(31))


@dataclass(frozen=True)
class SampledRun:
    """A run of which only the samples are seen; entries keep the shapes of whole tensors."""

    run: Recorded

    @property
    def entries(self) -> Mapping[tuple[Kind, str], Entry]:
        """As of the run."""
        return self.run.entries

    def tensor(self, kind: Kind, name: str) -> Tensor:
        """The samples of a tensor."""
        return sample(self.entries[kind, name], self.run.tensor(kind, name))


@dataclass(frozen=True)
class RoutedRun:
    """The routers of a run, cut to the tokens whose experts a capture keeps."""

    run: Recorded

    @property
    def entries(self) -> Mapping[tuple[Kind, str], Entry]:
        """Routers' entries, with the shapes of the tokens that are kept."""
        out = {}
        for entry in self.run.entries.values():
            if entry.kind in (Kind.ROUTED_EXPERTS, Kind.ROUTING_SCORES):
                out[entry.key] = _reshaped(entry, self._kept(entry))
        return out

    def tensor(self, kind: Kind, name: str) -> Tensor:
        """A router's tensor of these tokens."""
        whole = self.run.tensor(kind, name)
        return whole.narrow(-2, 0, self._kept(self.run.entries[kind, name])[-2])

    def _kept(self, entry: Entry) -> tuple[int, ...]:
        routed = self.run.entries.get((Kind.ROUTED_EXPERTS, entry.name), entry)
        return (*entry.shape[:-2], sampled_shape(routed)[-2], entry.shape[-1])


def _reshaped(entry: Entry, shape: Sequence[int]) -> Entry:
    return Entry(
        entry.kind, entry.name, entry.order, entry.module_type, entry.layer, entry.impl, entry.dtype, tuple(shape)
    )
