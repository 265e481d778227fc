"""What the tests on a device rely on: the choice of a kernel's configuration, and failures that free memory.

Needs no device itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import pytest
import torch

Block = Callable[[type[Any]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Config:
    num_warps: int
    num_stages: int = 3


class Autotuner:
    """The part of Triton's autotuner (3.6) that decides: prune, bench every configuration, keep the fastest."""

    too_big = Config(num_warps=4, num_stages=4)

    def __init__(self, configs: list[Config]) -> None:
        self.configs = configs
        self.cache: dict[str, Config] = {}
        self.launched: list[Config] = []

    def do_bench(self, call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
        for _ in range(100):
            call()
        return [1.0 / self.launched[-1].num_warps] * 3

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Config]:
        return self.configs

    def check_disk_cache(self, key: Any, configs: Any, benchmark: Callable[[], None]) -> bool:
        raise AssertionError("a choice must not be stored")

    def _bench(self, *args: Any, config: Config, **meta: Any) -> list[float]:
        if config == self.too_big:
            return [math.inf] * 3
        return self.do_bench(lambda: self.launched.append(config), quantiles=(0.5, 0.2, 0.8))

    def run(self, key: str) -> Config:
        if key not in self.cache:
            configs = self.prune_configs({})

            def benchmark() -> None:
                timings = {config: self._bench(config=config) for config in configs}
                self.cache[key] = min(timings, key=lambda config: timings[config][0])

            self.check_disk_cache(key, configs, benchmark)
        self.launched.append(self.cache[key])
        return self.cache[key]


def test_the_configuration_nearest_to_tritons_defaults_is_taken_after_one_launch(first_config: Block) -> None:
    tuner = Autotuner([Config(1), Config(8), Config(4, 2), Config(4, 3), Config(2)])

    with first_config(Autotuner):
        chosen = tuner.run("a")

    assert chosen == Config(4, 3)
    assert tuner.launched == [chosen, chosen]


def test_a_configuration_that_does_not_fit_is_passed_over(first_config: Block) -> None:
    tuner = Autotuner([Config(8), Autotuner.too_big, Config(16)])

    with first_config(Autotuner):
        chosen = tuner.run("a")

    assert chosen == Config(8)


def test_every_key_of_a_kernel_is_settled_by_itself(first_config: Block) -> None:
    tuner = Autotuner([Config(8), Config(2)])

    with first_config(Autotuner):
        tuner.run("a")
        tuner.run("b")
        chosen = dict(tuner.cache)

    assert chosen == {"a": Config(2), "b": Config(2)}


def test_afterwards_the_autotuner_is_as_before_and_has_chosen_nothing(first_config: Block) -> None:
    tuner, before = Autotuner([Config(4), Config(8)]), dict(vars(Autotuner))

    with first_config(Autotuner):
        tuner.run("a")

    assert dict(vars(Autotuner)) == before
    assert tuner.cache == {}


def test_a_failure_of_the_device_says_where_and_keeps_no_tensor_alive(
    contained: Callable[[Callable[[], Any]], Any],
) -> None:
    alive = []

    def body() -> None:
        big = torch.zeros(3)
        alive.append(ref(big))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(pytest.fail.Exception, match=r"in body[\s\S]*CUDA out of memory") as failed:
        contained(body)

    assert failed.value.__context__ is None
    assert [tensor() for tensor in alive] == [None]
