"""Hardware predicates, with the machine simulated."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from k3kernels import (
    GpuKernelRequirement,
    MluKernelRequirement,
    NpuKernelRequirement,
    NvidiaGpuPlatform,
    RocmGpuPlatform,
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200: compute capability 9.0, a CUDA build."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("platforms", "reason"),
    [
        ((NvidiaGpuPlatform(),), None),
        ((NvidiaGpuPlatform(min_cc=90),), None),
        ((NvidiaGpuPlatform(min_cc=80, max_cc=90),), None),
        ((NvidiaGpuPlatform(min_cc=100),), "compute capability 90 is below 100"),
        ((NvidiaGpuPlatform(max_cc=89),), "compute capability 90 is above 89"),
        ((RocmGpuPlatform(),), "this torch is not built for ROCm"),
        ((RocmGpuPlatform(), NvidiaGpuPlatform(min_cc=90)), None),
        ((RocmGpuPlatform(), NvidiaGpuPlatform(min_cc=100)), "not built for ROCm; compute capability 90 is below 100"),
    ],
)
def test_row_5_an_h200_meets_what_it_should(
    platforms: tuple[NvidiaGpuPlatform | RocmGpuPlatform, ...], reason: str | None
) -> None:
    requirement = GpuKernelRequirement(platforms=platforms)

    assert requirement.matches() == (reason is None)
    if reason is None:
        requirement.check()
    else:
        with pytest.raises(RuntimeError, match=reason):
            requirement.check()


def test_row_5_a_rocm_build_is_no_nvidia_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.0")

    assert GpuKernelRequirement((RocmGpuPlatform(),)).matches()
    assert "built for ROCm" in str(GpuKernelRequirement((NvidiaGpuPlatform(),)).unmet())


def test_row_5_without_a_device_nothing_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert GpuKernelRequirement().unmet() == "no CUDA device"


def test_row_5_a_requirement_without_platforms_is_refused() -> None:
    with pytest.raises(ValueError, match="never be met"):
        GpuKernelRequirement(platforms=())


@pytest.mark.parametrize(
    ("requirement", "package", "device"),
    [(NpuKernelRequirement(), "torch_npu", "npu"), (MluKernelRequirement(), "torch_mlu", "mlu")],
)
def test_row_5_a_plugged_device_says_what_is_missing(
    requirement: NpuKernelRequirement | MluKernelRequirement,
    package: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = requirement.unmet()
    plugin = SimpleNamespace(__spec__=SimpleNamespace(name=package), __name__=package)
    monkeypatch.setitem(sys.modules, package, plugin)  # type: ignore[arg-type]
    without_namespace = requirement.unmet()
    monkeypatch.setattr(torch, device, SimpleNamespace(is_available=lambda: False), raising=False)
    without_device = requirement.unmet()
    monkeypatch.setattr(torch, device, SimpleNamespace(is_available=lambda: True), raising=False)

    assert absent == f"{package} is not installed"
    assert without_namespace == without_device == f"{package} loads but finds no {device} device"
    assert requirement.matches()


def test_row_5_a_package_that_does_not_load_is_a_reason_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    (tmp_path / "torch_npu.py").write_text("raise OSError('libhccl.so: cannot open shared object file')\n")  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))

    reason = NpuKernelRequirement().unmet()

    assert reason == "torch_npu is installed but does not load: libhccl.so: cannot open shared object file"


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        (GpuKernelRequirement((NvidiaGpuPlatform(min_cc=90),)), "NVIDIA (compute capability >= 90)"),
        (
            GpuKernelRequirement((NvidiaGpuPlatform(80, 90), RocmGpuPlatform())),
            "NVIDIA (compute capability >= 80, <= 90) or ROCm",
        ),
        (NpuKernelRequirement(), "npu through torch_npu"),
    ],
)
def test_requirements_describe_themselves(requirement: GpuKernelRequirement, words: str) -> None:
    assert requirement.describe() == words
