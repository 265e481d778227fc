"""The op table: rows are declared without importing them, and resolved or refused, never replaced.

A row is keyed by (op, variant, impl, device). ``resolve`` looks for the exact device first and then for ``"any"``;
what was asked for is returned, or an error says why not. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from k3kernels.ops import builtin_rows
from k3kernels.requirement import KernelRequirement
from k3kernels.row import ANY_DEVICE, Entry, Row


class Registry:
    """A table of rows.

    Args:
        rows: The rows to begin with.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: dict[tuple[str, str, str], dict[str, Row]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add a row.

        Raises:
            ValueError: the same op, variant and impl is there already for the same device.
        """
        devices = self._rows.setdefault(row.triple, {})
        if row.device in devices:
            raise ValueError(f"{'/'.join(row.triple)} is already registered for device {row.device!r}")
        devices[row.device] = row

    def rows(self, op: str | None = None) -> tuple[Row, ...]:
        """All rows, or those of one op, sorted by name and device.

        Raises:
            KeyError: there is no such op.
        """
        found = [row for devices in self._rows.values() for row in devices.values() if op in (None, row.op)]
        if op is not None and not found:
            raise KeyError(f"no op {op!r}; there are: {_names(triple[0] for triple in self._rows)}")
        return tuple(sorted(found, key=lambda row: (*row.triple, row.device)))

    def find(self, op: str, variant: str, impl: str, device: str) -> Row:
        """The row of an implementation on a device: the exact device first, then ``"any"``.

        Raises:
            KeyError: unknown op, variant or impl; the message lists what exists.
            RuntimeError: known, but registered for other devices only.
        """
        devices = self._rows.get((op, variant, impl))
        if devices is None:
            raise KeyError(self._unknown(op, variant, impl))
        row = devices.get(device) or devices.get(ANY_DEVICE)
        if row is None:
            raise RuntimeError(f"{op}/{variant}/{impl} is registered for {_names(devices)}, not for {device}")
        return row

    def resolve(self, op: str, variant: str, impl: str, device: str | None = None) -> Callable[..., Any]:
        """Return the implementation that was asked for, or say why not. Nothing else is ever returned.

        Args:
            op: E.g. ``"kda"``.
            variant: E.g. ``"chunk"``.
            impl: E.g. ``"eager"``.
            device: Device type, e.g. ``"cuda"``; None takes this machine's accelerator, or ``"cpu"``.

        Returns:
            The differentiable function.

        Raises:
            KeyError: unknown op, variant or impl; the message lists what exists.
            RuntimeError: known, but not for this device or not usable here; the message says why.
            ImportError: the implementation is there but its import fails.
        """
        wanted = current_device() if device is None else device
        row = self.find(op, variant, impl, wanted)
        if reason := row.unmet():
            raise RuntimeError(f"{op}/{variant}/{impl} cannot run on {wanted}: {reason}")
        return row.load()

    def unusable(self, row: Row, device: str) -> str | None:
        """Why a row would not be used on a device of this machine, or None."""
        if row.device not in (device, ANY_DEVICE):
            return row.unmet() or f"needs a {row.device} device, this is {device}"
        return row.unmet()

    def _unknown(self, op: str, variant: str, impl: str) -> str:
        same_op = [triple for triple in self._rows if triple[0] == op]
        if not same_op:
            return f"no op {op!r}; there are: {_names(triple[0] for triple in self._rows)}"
        same_variant = [triple for triple in same_op if triple[1] == variant]
        if not same_variant:
            return f"{op} has no variant {variant!r}; it has: {_names(triple[1] for triple in same_op)}"
        return f"{op}/{variant} has no impl {impl!r}; it has: {_names(triple[2] for triple in same_variant)}"


@cache
def default_registry() -> Registry:
    """The registry of this process, with the built-in rows in it."""
    return Registry(builtin_rows())


@cache
def current_device() -> str:
    """The type of this machine's accelerator, or ``"cpu"``."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def register_op(
    op: str,
    variant: str,
    impl: str,
    forward: Entry | None = None,
    backward: Entry | None = None,
    *,
    wrapper: Entry | None = None,
    description: str,
    requirement: KernelRequirement | None = None,
    requires: tuple[str, ...] = (),
) -> Row:
    """Add an implementation of an op to this process's table.

    Args:
        op: What is computed.
        variant: Which form of it.
        impl: Who computes it.
        forward: Raw forward, a function or ``"package.module:function"``; see ``k3kernels.pair.differentiable_op``.
        backward: Raw backward of the same pair.
        wrapper: One function that autograd understands already, instead of a pair.
        description: One line for the table.
        requirement: The hardware it needs; its ``device`` is part of the key.
        requires: Modules that must be discoverable.

    Returns:
        The row.

    Raises:
        ValueError: the description is empty, the pair is incomplete, both forms or none are given, or the key exists.
    """
    row = Row(
        op,
        variant,
        impl,
        forward=forward,
        backward=backward,
        wrapper=wrapper,
        description=description,
        requirement=requirement,
        requires=tuple(requires),
    )
    default_registry().add(row)
    return row


def resolve(op: str, variant: str, impl: str, device: str | None = None) -> Callable[..., Any]:
    """``Registry.resolve`` on this process's table."""
    return default_registry().resolve(op, variant, impl, device)


def list_registered(op: str | None = None) -> tuple[tuple[str, str, str], ...]:
    """Every (op, variant, impl), usable here or not."""
    return tuple(dict.fromkeys(row.triple for row in default_registry().rows(op)))


def list_available(op: str | None = None) -> tuple[tuple[str, str, str], ...]:
    """Every (op, variant, impl) that ``resolve`` would return on this machine."""
    registry, device = default_registry(), current_device()
    usable = (row.triple for row in registry.rows(op) if registry.unusable(row, device) is None)
    return tuple(dict.fromkeys(usable))


def list_entries(op: str | None = None) -> tuple[Row, ...]:
    """Every row in full."""
    return default_registry().rows(op)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
