"""The op table as data, for ``k3convert ops``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from k3kernels.registry import current_device, default_registry


@dataclass(frozen=True, slots=True)
class Listing:
    """One row of the table, and whether this machine can use it."""

    op: str
    variant: str
    impl: str
    device: str
    form: str
    description: str
    requirement: str | None
    requires: tuple[str, ...]
    usable: bool
    reason: str | None

    def document(self) -> dict[str, Any]:
        """The row as JSON-able data."""
        return {**asdict(self), "requires": list(self.requires)}


def listing(op: str | None = None, *, device: str | None = None) -> tuple[Listing, ...]:
    """Every row, sorted, with the reason when it cannot be used here.

    Args:
        op: Only this op; None lists all.
        device: Judge for this device type; None takes this machine's accelerator, or ``"cpu"``.

    Raises:
        KeyError: there is no such op; the message lists what exists.
    """
    registry = default_registry()
    judged_for = current_device() if device is None else device
    out = []
    for row in registry.rows(op):
        reason = registry.unusable(row, judged_for)
        out.append(
            Listing(
                op=row.op,
                variant=row.variant,
                impl=row.impl,
                device=row.device,
                form=row.form,
                description=row.description,
                requirement=None if row.requirement is None else row.requirement.describe(),
                requires=row.requires,
                usable=reason is None,
                reason=reason,
            )
        )
    return tuple(out)
