"""What tests on a CUDA device share: free memory, one configuration a kernel, a JSON line for every measurement."""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from k3kernels.first_config import first_config, untuned_kernels

# The driver needs memory that torch's allocator does not hold: for code, and for registers that kernels spill.
MEMORY_SHARE = 0.96
MEASUREMENTS = "K3_GPU_MEASUREMENTS"
AUTOTUNE = "K3_GPU_AUTOTUNE"

Report = Callable[..., None]


@pytest.fixture(name="first_config")
def first_config_block() -> Callable[[type[Any]], AbstractContextManager[None]]:
    """``with first_config(Autotuner)``."""
    return first_config


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests marked gpu: a CUDA device with its memory free before and after, and kernels that are not tuned.

    ``K3_GPU_AUTOTUNE=full`` leaves the tuning on.
    """
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE)
    free_memory()
    with nullcontext() if is_tuned() else untuned_kernels():
        yield
    free_memory()


def is_tuned() -> bool:
    return os.environ.get(AUTOTUNE) == "full"


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Write one JSON line at once: past pytest's capturing, and to the file that ``K3_GPU_MEASUREMENTS`` names."""

    def write(**values: Any) -> None:
        autotune = "full" if is_tuned() else "first config"
        line = json.dumps({"device": torch.cuda.get_device_name(), "autotune": autotune, **values})
        with capsys.disabled():
            print("\n" + line, flush=True)
        if path := os.environ.get(MEASUREMENTS):
            with open(path, "a") as file:
                file.write(line + "\n")

    return write


@pytest.fixture
def contained() -> Callable[[Callable[[], Any]], Any]:
    """Runs a function that holds tensors; where the device fails, the failure is text and keeps none of them alive."""

    def run(body: Callable[[], Any]) -> Any:
        try:
            return body()
        except RuntimeError:
            reason = traceback.format_exc(limit=-5)
        pytest.fail(reason[-3000:], pytrace=False)

    return run
