"""The machine and the libraries that a report was made with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from k3convert.version import __version__

_PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core", "torch-npu", "safetensors", "numpy")
_CPU_INFO = Path("/proc/cpuinfo")
# Where an installation of CANN says its version.
_CANN_VERSION = "version.info"


def environment_of(device_type: str) -> dict[str, str]:
    """Versions and names; what is not there has no entry."""
    found = {
        "k3convert": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if device_type != "cpu":
        module = torch.get_device_module(device_type)
        found["device"] = module.get_device_name()
        found["num_devices"] = str(module.device_count())
    if device_type == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    cann = Path(os.environ.get("ASCEND_HOME_PATH", "/nowhere")) / _CANN_VERSION
    if cann.is_file():
        found["cann"] = cann.read_text(encoding="utf-8", errors="replace").strip()[:200]
    return found


def _processor() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
