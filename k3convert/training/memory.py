"""Memory of a rank: what it will need, and what it took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3convert.execution.memory import peak_resident_bytes, resident_bytes

MOMENTS = 2


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of this rank's share of what training keeps."""

    parameters: int
    gradients: int
    moments: int

    @classmethod
    def of(cls, network: nn.Module) -> StateBytes:
        """Of a network as it is laid out: gradients and moments follow the parameters that are trained."""
        trained = local_bytes(parameter for parameter in network.parameters() if parameter.requires_grad)
        return cls(local_bytes(network.state_dict().values()), trained, MOMENTS * trained)

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.moments


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's parts."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


class MemoryWatch:
    """The most memory since the watch began.

    On an accelerator this is what torch allocated and what it reserved; on the CPU the process's resident memory beyond
    what it had at the start, for both.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._start = resident_bytes()

    def peaks(self) -> tuple[int, int]:
        """Bytes allocated and reserved, at most."""
        if self.device_type == "cpu":
            peak = max(0, peak_resident_bytes() - self._start)
            return peak, peak
        module = torch.get_device_module(self.device_type)
        return int(module.max_memory_allocated()), int(module.max_memory_reserved())
