"""The op names that a recipe may use."""

from __future__ import annotations

from k3kernels.registry import default_registry
from k3kernels.selection import ALIASES, FIELD_OPS

OPS_FIELDS = tuple(FIELD_OPS)


def unregistered(field: str, impl: str) -> str | None:
    """Why a choice names no registered implementation, or None; whether it runs here is another question."""
    op, variant = FIELD_OPS[field]
    impls = sorted({row.impl for row in default_registry().rows(op) if row.variant == variant})
    if ALIASES.get((field, impl), impl) in impls:
        return None
    return f"{field}: {op}/{variant} has no impl {impl!r}; it has: {', '.join(impls)}"


def has_impl(field: str, impl: str) -> bool:
    """Whether a field's op has an implementation of that name."""
    return unregistered(field, impl) is None
