"""Kernels without tuning: each takes the first configuration that runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

TRITON_WARPS, TRITON_STAGES = 4, 3


def untuned_kernels() -> AbstractContextManager[None]:
    """``first_config`` for Triton's autotuner inside the block; nothing where Triton is not installed."""
    if find_spec("triton") is None:
        return nullcontext()
    from triton.runtime.autotuner import Autotuner

    return first_config(Autotuner)


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
        with patch.dict(vars(self), do_bench=_call_once):
            timings: list[float] = bench(self, *args, config=config, **meta)
        if math.isfinite(timings[0]):
            settled.add(id(self))
        return timings

    def check_disk_cache(self: Any, key: Any, configs: Any, benchmark: Callable[[], None]) -> bool:
        benchmark()
        return False

    with ExitStack() as stack:
        for name, replacement in (
            ("prune_configs", prune_configs),
            ("_bench", bench_once),
            ("check_disk_cache", check_disk_cache),
        ):
            stack.enter_context(patch.object(autotuner, name, replacement))
        try:
            yield
        finally:
            for tuner in seen.values():
                tuner.cache.clear()


def _call_once(call: Callable[[], Any], quantiles: Any) -> list[float]:
    """Stands for Triton's benchmark: the kernel runs, nothing is timed."""
    call()
    return [0.0] * len(quantiles)
