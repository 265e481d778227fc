"""What hardware a row needs, as a predicate that answers with a reason.

Nothing here imports torch before it is asked about the machine.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


class KernelRequirement(ABC):
    """The hardware a row needs: a device type, and a predicate about the machine."""

    device: ClassVar[str]

    @abstractmethod
    def unmet(self) -> str | None:
        """Why this machine does not satisfy the requirement, or None when it does."""

    @abstractmethod
    def describe(self) -> str:
        """The requirement in a few words, for tables."""

    def matches(self) -> bool:
        """Whether this machine satisfies the requirement."""
        return self.unmet() is None

    def check(self) -> None:
        """Refuse a machine that does not satisfy the requirement.

        Raises:
            RuntimeError: with the reason.
        """
        if reason := self.unmet():
            raise RuntimeError(reason)


@dataclass(frozen=True, slots=True)
class NvidiaGpuPlatform:
    """CUDA devices between two compute capabilities, both included; 90 is Hopper (H100, H200)."""

    min_cc: int | None = None
    max_cc: int | None = None

    def unmet(self) -> str | None:
        """Why the current CUDA device is not one of these, or None."""
        import torch

        if torch.version.hip is not None:
            return "this torch is built for ROCm, not for CUDA"
        major, minor = torch.cuda.get_device_capability()
        found = 10 * major + minor
        if self.min_cc is not None and found < self.min_cc:
            return f"compute capability {found} is below {self.min_cc}"
        if self.max_cc is not None and found > self.max_cc:
            return f"compute capability {found} is above {self.max_cc}"
        return None

    def describe(self) -> str:
        """The platform in a few words."""
        bounds = [f">= {self.min_cc}"] if self.min_cc is not None else []
        bounds += [f"<= {self.max_cc}"] if self.max_cc is not None else []
        return "NVIDIA" + (f" (compute capability {', '.join(bounds)})" if bounds else "")


@dataclass(frozen=True, slots=True)
class RocmGpuPlatform:
    """AMD devices behind torch's ``cuda`` device type."""

    def unmet(self) -> str | None:
        """Why the current device is not an AMD one, or None."""
        import torch

        return None if torch.version.hip is not None else "this torch is not built for ROCm"

    def describe(self) -> str:
        """The platform in a few words."""
        return "ROCm"


@dataclass(frozen=True)
class GpuKernelRequirement(KernelRequirement):
    """A ``cuda`` device of one of the platforms."""

    device: ClassVar[str] = "cuda"
    platforms: tuple[NvidiaGpuPlatform | RocmGpuPlatform, ...] = (NvidiaGpuPlatform(),)

    def __post_init__(self) -> None:
        if not self.platforms:
            raise ValueError("a GPU requirement without a platform can never be met")

    def unmet(self) -> str | None:
        """Why no platform matches this machine, or None."""
        import torch

        if not torch.cuda.is_available():
            return "no CUDA device"
        reasons = [platform.unmet() for platform in self.platforms]
        return None if None in reasons else "; ".join(reason for reason in reasons if reason)

    def describe(self) -> str:
        """The platforms, any of which will do."""
        return " or ".join(platform.describe() for platform in self.platforms)


class PluggedDeviceRequirement(KernelRequirement):
    """A device type that a package plugs into torch; importable and present are two questions."""

    package: ClassVar[str]

    def unmet(self) -> str | None:
        """Why torch has no such device here, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        try:
            importlib.import_module(self.package)
        except (ImportError, OSError, RuntimeError) as error:  # a missing vendor library shows as any of these
            return f"{self.package} is installed but does not load: {error}"
        import torch

        namespace = getattr(torch, self.device, None)
        if namespace is None or not namespace.is_available():
            return f"{self.package} loads but finds no {self.device} device"
        return None

    def describe(self) -> str:
        """The device and the package that brings it."""
        return f"{self.device} through {self.package}"


@dataclass(frozen=True)
class NpuKernelRequirement(PluggedDeviceRequirement):
    """An Ascend device through ``torch_npu``."""

    device: ClassVar[str] = "npu"
    package: ClassVar[str] = "torch_npu"


@dataclass(frozen=True)
class MluKernelRequirement(PluggedDeviceRequirement):
    """A Cambricon device through ``torch_mlu``."""

    device: ClassVar[str] = "mlu"
    package: ClassVar[str] = "torch_mlu"
