"""``selftest``: every planted fault must turn the verdict, and be found where it was planted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from k3convert.errors import UsageError
from k3convert.loading.checked_source import open_checked
from k3convert.parity.cells import parse_cell
from k3convert.parity.faults import NETWORK_FAULTS, NetworkFault
from k3convert.parity.outcome import CellOutcome, Status
from k3convert.parity.records import Kind
from k3convert.parity.run_pools import RunPools
from k3convert.parity.session import ParitySession, SessionOptions
from k3convert.parity.stored_faults import STORED_FAULTS, find_refusal
from k3convert.synthesis import make_checkpoint

# Of the generated checkpoint: faults are in layers 2 and 3, and something comes after them.
NUM_LAYERS = 5


@dataclass(frozen=True, slots=True)
class FaultResult:
    """What became of one planted fault.

    Attributes:
        name: of the fault.
        description: what it does.
        is_caught: whether the verdict turned, or the checkpoint was refused.
        is_localised: whether it was found at the right place.
        wanted: where it must be found.
        found: where it was found, or what the refusal said.
    """

    name: str
    description: str
    is_caught: bool
    is_localised: bool
    wanted: str
    found: str

    @property
    def passed(self) -> bool:
        """Caught, at the right place."""
        return self.is_caught and self.is_localised


@dataclass(frozen=True, slots=True)
class SelftestReport:
    """All faults, and whether the unfaulted control passed."""

    control: str
    control_passed: bool
    faults: tuple[FaultResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every fault was found and the control was not accused."""
        return self.control_passed and all(fault.passed for fault in self.faults)

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {
            "passed": self.passed,
            "num_faults": len(self.faults),
            "num_localised": sum(fault.passed for fault in self.faults),
        }


def fault_names() -> tuple[str, ...]:
    """Every fault that can be planted."""
    return (*NETWORK_FAULTS, *STORED_FAULTS)


def selftest(
    names: Sequence[str] = (),
    *,
    timeout_s: float = 300.0,
    on_fault: Callable[[str, int], None] = lambda name, total: None,
) -> SelftestReport:
    """Plant faults into a generated checkpoint and its network, one at a time.

    Args:
        names: which; none stands for all.
        timeout_s: of one run.
        on_fault: hears of every fault before it is planted, and how many there are.

    Raises:
        UsageError: a name that no fault has.
    """
    chosen = tuple(names) or fault_names()
    if unknown := [name for name in chosen if name not in fault_names()]:
        raise UsageError(f"no fault {', '.join(unknown)}", hint=f"there are: {', '.join(fault_names())}")
    with tempfile.TemporaryDirectory(prefix="k3selftest-") as folder:
        scratch = Path(folder)
        checkpoint = scratch / "checkpoint"
        make_checkpoint(checkpoint, preset="tiny", num_layers=NUM_LAYERS, num_experts=None, seed=0, sparse=False)
        results = {}
        for name in chosen:
            if name in STORED_FAULTS:
                on_fault(name, len(chosen))
                results[name] = _try_stored(name, checkpoint, scratch)
        with RunPools("cpu", deterministic=False, timeout_s=timeout_s) as pools:
            session = ParitySession(SessionOptions(checkpoint, open_checked(checkpoint).config), pools)
            control = session.judge(parse_cell("dtype=fp32"))
            for name in chosen:
                if name in NETWORK_FAULTS:
                    on_fault(name, len(chosen))
                    fault = NETWORK_FAULTS[name]
                    results[name] = _result_of(name, fault, session.judge(_cell_of(fault), name))
    return SelftestReport(str(control.cell), control.status is Status.PASSED, tuple(results[name] for name in chosen))


def first_difference(outcome: CellOutcome) -> tuple[Kind, str] | None:
    """Where the first difference of an outcome is: a tensor, or one that could not be compared as it should be."""
    comparison = outcome.comparison
    if comparison is None:
        return None
    if comparison.first_outside is not None:
        return comparison.first_outside.key
    return next(((fault.kind, fault.name) for fault in comparison.faults), None)


def _cell_of(fault: NetworkFault) -> Any:
    return parse_cell(",".join(filter(None, (fault.cell, "dtype=fp32"))))


def _result_of(name: str, fault: NetworkFault, outcome: CellOutcome) -> FaultResult:
    found = first_difference(outcome)
    return FaultResult(
        name,
        fault.description,
        is_caught=outcome.status is Status.FAILED,
        is_localised=found is not None and found[0] in fault.kinds and fnmatchcase(found[1], fault.name),
        wanted=f"{fault.name} ({' or '.join(fault.kinds)})",
        found=f"{found[1]} ({found[0]})" if found is not None else f"nowhere: {outcome.status}, {outcome.reason}",
    )


def _try_stored(name: str, checkpoint: Path, scratch: Path) -> FaultResult:
    fault = STORED_FAULTS[name]
    is_refused, is_named, said = find_refusal(fault, checkpoint, scratch)
    return FaultResult(
        name, fault.description, is_refused, is_named, wanted=f"refused, naming {fault.names}", found=said
    )
