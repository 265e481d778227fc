"""Which kernels a step ran: a Chrome trace, and whether the chosen implementations are in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from k3convert.training.fake_quantization import FakeQuantizedExperts
from k3convert.training.outcome import KernelReport, OpTrace
from k3kernels import K3Op
from k3kernels.selection import ALIASES, EAGER, FIELD_OPS

TRACE_NAME = "trace.json"
MARK = "k3:"

# What an implementation's own kernels are called, in part; one fragment of each must be inside the op's range. Those of
# implementations that are not listed are shown, not judged.
KERNEL_NAMES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("moe_experts", "grouped_mm"): ("grouped_mm",),
    ("mla_attention", "sdpa"): ("scaled_dot_product",),
    ("kda", "fla"): ("kda",),
    ("kda_gate", "fla"): ("kda_gate",),
    ("attn_res", "fla"): ("attnres", "attn_res"),
    ("gated_rms_norm", "fla"): ("norm",),
    ("short_conv", "fla"): ("conv",),
}


class _Marked:
    """An op whose calls have a range of their own in a trace."""

    def __init__(self, op: K3Op) -> None:
        self.op = op
        self.name = f"{op.op}/{op.variant}/{op.impl}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with record_function(MARK + self.name):
            return self.op(*args, **kwargs)


class KernelTrace:
    """Records one step of a network.

    Args:
        network: its ops are marked while the step runs.
        chosen: implementation by config field.
        device_type: where kernels run.
    """

    def __init__(self, network: nn.Module, chosen: Mapping[str, str], device_type: str) -> None:
        self._network, self._chosen, self._device_type = network, chosen, device_type
        self._profile: Any = None
        self._present: set[str] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Mark the ops, and record what runs inside."""
        activities = [ProfilerActivity.CPU]
        if self._device_type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        places = list(_handles(self._network))
        for holder, attribute, op in places:
            setattr(holder, attribute, marked := _Marked(op))
            self._present.add(marked.name)
        try:
            with profile(activities=activities) as self._profile:
                yield
                if self._device_type != "cpu":
                    torch.get_device_module(self._device_type).synchronize()
        finally:
            for holder, attribute, op in places:
                setattr(holder, attribute, op)

    def write(self, out: Path) -> None:
        """The Chrome trace."""
        self._profile.export_chrome_trace(str(out / TRACE_NAME))

    def report(self, step: int) -> KernelReport:
        """What ran."""
        calls: dict[str, int] = {}
        kernels: dict[str, set[str]] = {}
        for event in self._profile.events():
            if event.name.startswith(MARK):
                name = event.name.removeprefix(MARK)
                calls[name] = calls.get(name, 0) + 1
                kernels.setdefault(name, set()).update(_inside(event, on_device=self._device_type != "cpu"))
        ops = tuple(OpTrace(name, calls[name], tuple(sorted(kernels[name]))) for name in sorted(calls))
        return KernelReport(step, ops, tuple(judge_ops(ops, self._chosen, self._present)))


def judge_ops(ops: tuple[OpTrace, ...], chosen: Mapping[str, str], present: set[str]) -> Iterator[str]:
    """What is wrong: a chosen implementation that did not run, one without its kernels, an eager one in its place.

    Args:
        ops: that ran.
        chosen: implementation by config field.
        present: ``op/variant/impl`` of all handles of the network; an op that the network has not cannot run.
    """
    ran = {op.name: op for op in ops}
    variants = {name.rpartition("/")[0] for name in present}
    for field, written in chosen.items():
        op, variant = FIELD_OPS[field]
        impl = ALIASES.get((field, written), written)
        name = f"{op}/{variant}/{impl}"
        if impl == EAGER or f"{op}/{variant}" not in variants:
            continue
        if f"{op}/{variant}/{EAGER}" in ran:
            yield f"{field}: {op}/{variant}/{EAGER} ran, {impl} was chosen"
        found = ran.get(name)
        if found is None:
            yield f"{field}: {name} did not run"
        elif (wanted := KERNEL_NAMES.get((op, impl))) and not any(
            fragment in kernel.lower() for kernel in found.kernels for fragment in wanted
        ):
            yield f"{field}: {name} ran without a kernel named {' or '.join(wanted)}"


def _handles(network: nn.Module) -> Iterator[tuple[Any, str, K3Op]]:
    """Every place that holds an op: the object, its attribute, the op."""
    for module in network.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, K3Op):
                yield module, attribute, value
            elif isinstance(value, FakeQuantizedExperts):
                yield value, "op", value.op


def _inside(event: Any, *, on_device: bool) -> Iterator[str]:
    """Names of what an event's range holds."""
    waiting = list(event.cpu_children)
    yield from (kernel.name for kernel in event.kernels)
    while waiting:
        child = waiting.pop()
        if not on_device:
            yield child.name
        yield from (kernel.name for kernel in child.kernels)
        waiting += child.cpu_children
