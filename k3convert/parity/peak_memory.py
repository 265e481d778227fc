"""The most memory that was in use while something ran: the device's, or this process's on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# What the kernel takes as: forget the highest resident size so far.
_FORGET_PEAK = "5"


class PeakMemory:
    """Watches the peak between entering and leaving.

    Attributes:
        peak_bytes: allocated by torch on a device; resident on the CPU; 0 where the system does not say.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        if self.device.type != "cpu":
            torch.get_device_module(self.device.type).reset_peak_memory_stats()
        elif _CLEAR.exists():
            _CLEAR.write_text(_FORGET_PEAK)
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type != "cpu":
            self.peak_bytes = int(torch.get_device_module(self.device.type).max_memory_allocated())
        elif _STATUS.exists():
            lines = _STATUS.read_text().splitlines()
            self.peak_bytes = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
