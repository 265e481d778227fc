"""One implementation of an op on one device, described without importing it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

from k3kernels.requirement import KernelRequirement

ANY_DEVICE = "any"

Entry = str | Callable[..., Any]
"""A function, or ``"package.module:function"``, which is imported on first use."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the op table: either a raw forward/backward pair or one wrapper.

    Attributes:
        op: What is computed, e.g. ``"kda"``.
        variant: Which form of it, e.g. ``"chunk"``. Variants may differ in signature, impls of one variant never do.
        impl: Who computes it; ``"eager"`` is the specification.
        forward: Raw forward of a pair: ``forward(*tensors, **attributes) -> (output, SavedState)``.
        backward: Raw backward of a pair: ``backward(saved, *grad_outputs) -> one gradient per positional tensor``.
        wrapper: A function that autograd already understands, called as it is.
        description: One line for the table.
        requirement: The hardware it needs; None runs anywhere.
        requires: Modules that must be discoverable; they are looked for, not imported.

    Raises:
        ValueError: half a pair, both forms, neither form, an empty name or no description.
    """

    op: str
    variant: str
    impl: str
    forward: Entry | None = None
    backward: Entry | None = None
    wrapper: Entry | None = None
    description: str = ""
    requirement: KernelRequirement | None = None
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = []
        if not (self.op and self.variant and self.impl):
            problems.append("op, variant and impl must not be empty")
        if not self.description.strip():
            problems.append("a description is required")
        if (self.forward is None) != (self.backward is None):
            problems.append("forward and backward come together")
        if self.forward is not None and self.wrapper is not None:
            problems.append("a row has a forward/backward pair or a wrapper, not both")
        if self.forward is None and self.backward is None and self.wrapper is None:
            problems.append("a row needs a forward/backward pair or a wrapper")
        if problems:
            raise ValueError(f"{self.op}/{self.variant}/{self.impl} on {self.device}: {'; '.join(problems)}")

    @property
    def device(self) -> str:
        """The device type it runs on, or ``"any"``."""
        return ANY_DEVICE if self.requirement is None else self.requirement.device

    @property
    def triple(self) -> tuple[str, str, str]:
        """Op, variant and impl."""
        return self.op, self.variant, self.impl

    @property
    def form(self) -> str:
        """``"pair"`` or ``"wrapper"``."""
        return "wrapper" if self.wrapper is not None else "pair"

    def unmet(self) -> str | None:
        """Why this row cannot run here, or None: missing modules first, then hardware."""
        missing = [module for module in self.requires if not is_discoverable(module)]
        if missing:
            return f"not installed: {', '.join(missing)}"
        return None if self.requirement is None else self.requirement.unmet()

    def load(self) -> Callable[..., Any]:
        """Import the entry and return what callers call. An error of the import goes up as it is."""
        if self.wrapper is not None:
            return load_entry(self.wrapper)
        if self.forward is None or self.backward is None:
            raise ValueError(f"{'/'.join(self.triple)} has no complete pair")
        from k3kernels.pair import differentiable_op

        return differentiable_op(load_entry(self.forward), load_entry(self.backward), name="_".join(self.triple))


def load_entry(entry: Entry) -> Callable[..., Any]:
    """The function that an entry stands for, imported if it is named."""
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return loaded


def is_discoverable(module: str) -> bool:
    """Whether ``a.b.c`` could be imported, found without importing any part of it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    name = top
    for part in rest:
        if spec is None:
            break
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations or [])
    return spec is not None
