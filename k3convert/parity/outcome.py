"""What became of a cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from k3convert.errors import K3Error
from k3convert.parity.cells import Cell
from k3convert.parity.comparison import CellComparison
from k3convert.parity.divergence import Divergence


class Status(StrEnum):
    """How a cell ended. Only ``passed`` is a pass; ``not run`` never is one."""

    PASSED = "passed"
    FAILED = "failed"
    NONDETERMINISTIC = "nondeterministic"
    REFUSED = "refused"
    DIED = "died"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """One cell of a session.

    Attributes:
        cell: how the network ran.
        status: how it ended.
        reason: why it was not run, or refused; otherwise what had to be bitwise and why.
        comparison: with the references; None where the cell did not run to its end.
        divergence: where the difference begins; None where there is none to follow.
        unsteady: tensors that had other bits when the step was repeated.
        error: of a cell that was refused or died.
        elapsed_s: seconds for everything about the cell.
        step_s: seconds of its forward and backward pass, of the slowest rank, with recording.
        baseline_step_s: the same of the eager baseline on one rank.
        peak_bytes: the largest of all ranks.
        flags: what was in effect on the ranks.
    """

    cell: Cell
    status: Status
    reason: str
    comparison: CellComparison | None = None
    divergence: Divergence | None = None
    unsteady: tuple[str, ...] = ()
    error: K3Error | None = None
    elapsed_s: float = 0.0
    step_s: float = 0.0
    baseline_step_s: float = 0.0
    peak_bytes: int = 0
    flags: Mapping[str, str] = field(default_factory=dict)


def status_of(comparison: CellComparison, unsteady: tuple[str, ...]) -> Status:
    """How a cell ended that was compared: a step that does not repeat itself proves nothing either way."""
    if unsteady:
        return Status.NONDETERMINISTIC
    return Status.PASSED if comparison.passed else Status.FAILED
