"""The handle that a module holds: resolved once, interned, always the same implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3kernels.registry import current_device, resolve


class K3Op:
    """An implementation of an op, resolved when it is named and never again.

    Two handles with the same names are the same object; handles of different impls live side by side in one process.

    Args:
        op: E.g. ``"kda"``.
        variant: E.g. ``"chunk"``.
        impl: E.g. ``"eager"``.
        device: Device type; None takes this machine's accelerator, or ``"cpu"``.

    Raises:
        KeyError: unknown names.
        RuntimeError: known, but not usable here.
    """

    __slots__ = ("_call", "device", "impl", "op", "variant")

    _interned: dict[tuple[str, str, str, str], K3Op] = {}  # noqa: RUF012 - one table for the process, on purpose

    op: str
    variant: str
    impl: str
    device: str
    _call: Callable[..., Any]

    def __new__(cls, op: str, variant: str, impl: str, device: str | None = None) -> K3Op:  # noqa: D102 - see the class
        key = (op, variant, impl, current_device() if device is None else device)
        found = cls._interned.get(key)
        if found is None:
            found = super().__new__(cls)
            found._call = resolve(*key)
            found.op, found.variant, found.impl, found.device = key
            cls._interned[key] = found
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - the implementation's own
        return self._call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"K3Op({self.op!r}, {self.variant!r}, {self.impl!r}, device={self.device!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return K3Op, (self.op, self.variant, self.impl, self.device)
