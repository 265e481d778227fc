"""Everything that a run needs to go on, as named tensors that DCP saves and loads in place.

``model.*`` are the network's own names, so that ``dcp-to-hf`` reads a step like any other DCP; ``optimizer.*`` are the
moments by the same names; ``progress.*`` and ``rng.*`` are the run's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3convert.training.data.stream import Position
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.mesh import Mesh
from k3model.parallel.state import optimizer_state, sharded_state


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: optimizer steps done, where its data stand, tokens read."""

    step: int = 0
    position: Position = field(default_factory=Position)
    num_tokens: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """As 0-d int64 tensors."""
        numbers = {
            "step": self.step,
            "epoch": self.position.epoch,
            "row": self.position.row,
            "num_tokens": self.num_tokens,
        }
        return {name: torch.tensor(number) for name, number in numbers.items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Progress:
        """The progress that ``tensors`` describe."""
        numbers = {name: int(tensor) for name, tensor in tensors.items()}
        return cls(numbers["step"], Position(numbers["epoch"], numbers["row"]), numbers["num_tokens"])


def run_state(
    network: KimiK3ForConditionalGeneration, optimizer: torch.optim.Optimizer, mesh: Mesh, progress: Progress
) -> dict[str, Any]:
    """The whole state; tensors of network and optimizer are the live ones, shards are DTensors."""
    return {
        "model": sharded_state(network, mesh),
        "optimizer": optimizer_state(network, optimizer, mesh),
        "progress": progress.tensors(),
        "rng": {str(dist.get_rank()): generator_states(next(network.parameters()).device)},
    }


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Of torch's generators of this rank: uint8."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device.type).get_rng_state()
    return states


def set_generator_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Put torch's generators where they were."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device.type).set_rng_state(states["device"])
