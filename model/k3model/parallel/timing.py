"""How long the phases of a KDA layer take under ``sp``. Off unless asked for; then no object of this module is made."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

Phase = Callable[[str], AbstractContextManager[None]]

LAYER = "layer"
_UNTIMED = nullcontext()


def untimed(_name: str) -> AbstractContextManager[None]:
    """A phase that nobody measures."""
    return _UNTIMED


class KdaTiming:
    """Times the phases of one layer's forward pass, and writes a line of JSON when the layer is done.

    ``with timing("layer"):`` surrounds the whole; inside, ``with timing(name):`` measures a phase. The device is waited
    for at both ends of each, so that the layer is slower than it is untimed and a phase has its own work only.
    A line reads ``{"kda_sp_timing": {"layer": ..., "rank": ..., "ms": {"project": ..., ..., "layer": ...}}}``; a layer
    that the backward pass computes again writes another.

    Args:
        layer: its name in the network.
        rank: of this process, named in the line.
        device_type: what is waited for; ``cpu`` needs no waiting.
        write: where lines go; None measures without writing, so that all ranks wait alike.
    """

    def __init__(self, layer: str, rank: int, device_type: str, write: Callable[[str], None] | None) -> None:
        self.layer, self.rank, self.device_type, self.write = layer, rank, device_type, write
        self._milliseconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a phase; a name that comes again adds up. ``"layer"`` ends the line."""
        begin = self._now()
        yield
        self._milliseconds[name] = self._milliseconds.get(name, 0.0) + (self._now() - begin) * 1e3
        if name == LAYER:
            measured, self._milliseconds = self._milliseconds, {}
            if self.write is not None:
                line = {"layer": self.layer, "rank": self.rank, "ms": {k: round(v, 4) for k, v in measured.items()}}
                self.write(json.dumps({"kda_sp_timing": line}))

    def _now(self) -> float:
        if self.device_type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def write_line(line: str) -> None:
    """A line on stderr, where it mixes with no result."""
    print(line, file=sys.stderr, flush=True)
