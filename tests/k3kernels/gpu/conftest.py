"""What tests on a CUDA device share: free memory, one configuration a kernel, a JSON line for every measurement."""

from __future__ import annotations

import gc
import json
import math
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch

# The driver needs memory that torch's allocator does not hold: for code, and for registers that kernels spill.
MEMORY_SHARE = 0.96
MEASUREMENTS = "K3_GPU_MEASUREMENTS"
AUTOTUNE = "K3_GPU_AUTOTUNE"
TRITON_WARPS, TRITON_STAGES = 4, 3

Report = Callable[..., None]


@contextmanager
def first_config(autotuner: type[Any]) -> Iterator[None]:
    """Make an autotuner take the first configuration that runs, inside the block.

    A library that tries dozens of configurations of each kernel compiles for minutes. What a kernel computes does not
    depend on the choice; how fast it is does. Those nearest to Triton's defaults (4 warps, 3 stages) come first, and
    one that needs more than the device has is passed over, as always.

    Args:
        autotuner: ``triton.runtime.autotuner.Autotuner``; its subclasses follow. Afterwards its instances choose anew.
    """
    prune, bench = autotuner.prune_configs, autotuner._bench
    seen: dict[int, Any] = {}
    settled: set[int] = set()

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        seen[id(self)] = self
        settled.discard(id(self))
        return sorted(
            prune(self, kwargs),
            key=lambda config: (abs(config.num_warps - TRITON_WARPS), abs(config.num_stages - TRITON_STAGES)),
        )

    def bench_once(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if id(self) in settled:
            return [math.inf] * 3
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vars(self), "do_bench", call_once)
            timings: list[float] = bench(self, *args, config=config, **meta)
        if math.isfinite(timings[0]):
            settled.add(id(self))
        return timings

    def check_disk_cache(self: Any, key: Any, configs: Any, benchmark: Callable[[], None]) -> bool:
        benchmark()
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotuner, "prune_configs", prune_configs)
        patch.setattr(autotuner, "_bench", bench_once)
        patch.setattr(autotuner, "check_disk_cache", check_disk_cache)
        try:
            yield
        finally:
            for tuner in seen.values():
                tuner.cache.clear()


def call_once(call: Callable[[], Any], quantiles: Any) -> list[float]:
    """Stands for Triton's benchmark: the kernel runs, nothing is timed."""
    call()
    return [0.0] * len(quantiles)


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
    if find_spec("triton") is None or is_tuned():
        yield
    else:
        from triton.runtime.autotuner import Autotuner

        with first_config(Autotuner):
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
