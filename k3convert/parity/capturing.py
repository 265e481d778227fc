"""Captures of cells on one machine, and their comparison on another."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3convert.errors import BadInput
from k3convert.parity.capture import Identity, read_capture, write_capture
from k3convert.parity.capture_comparison import compare_with_capture
from k3convert.parity.cells import Cell, parse_cell
from k3convert.parity.expectation import Expectation
from k3convert.parity.inputs import batch_digest, make_batch
from k3convert.parity.outcome import CellOutcome, Status
from k3convert.parity.report.build import build_report
from k3convert.parity.report.document import ParityReport
from k3convert.parity.report.environment import environment_of
from k3convert.parity.session import SessionOptions, comparing_device
from k3convert.parity.verify import VerifyOptions, cells_of, open_session, prepare, session_document
from k3convert.parity.weights_digest import weights_digest
from k3convert.ranks.launched import LaunchedRanks

ANOTHER_MACHINE = "two machines may sum in different orders"


class NoCaptures(BadInput):
    """A folder holds no captures."""

    code = "no-captures"


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What was captured, and which cells could not run here and why."""

    folder: Path
    captured: tuple[str, ...]
    not_run: dict[str, str]

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {"folder": str(self.folder), "captured": list(self.captured), "not_run": self.not_run}


def capture_cells(
    options: VerifyOptions, folder: Path, *, on_cell: Callable[[Cell, int], None], launched: LaunchedRanks | None = None
) -> CaptureReport:
    """Run cells here and write a capture of each into a folder of its own.

    Every cell sends its tokens where the eager run on one rank of this machine sends them, so that what is captured
    is arithmetic and no flip of a near tie.

    Raises:
        RanksFailed, RanksSilent: a cell could not be run.
    """
    session_options = prepare(options)
    captured, not_run = [], {}
    with open_session(options, session_options, on_cell=on_cell, launched=launched) as session:
        for cell in cells_of(options):
            on_cell(cell, len(cells_of(options)))
            if reason := session.why_not_here(cell):
                not_run[str(cell)] = reason
                continue
            finished = session.run_forced(cell)
            write_capture(
                finished.run,
                folder / folder_name(cell),
                _identity(session_options, cell),
                environment_of(options.device_type) | finished.answers[0].flags,
            )
            session.pools.forget(finished)
            captured.append(str(cell))
    return CaptureReport(folder, tuple(captured), not_run)


def compare_captures(
    options: VerifyOptions, folder: Path, *, on_cell: Callable[[Cell, int], None], launched: LaunchedRanks | None = None
) -> ParityReport:
    """Compare every capture of a folder with the references of this machine.

    Raises:
        NoCaptures: there are none.
        BadInput: a capture is damaged, or of other weights, inputs or options.
    """
    paths = sorted(path.parent for path in folder.glob("*/capture.json"))
    if not paths:
        raise NoCaptures(f"{folder} holds no captures", hint="verify-parity --capture writes them")
    session_options = prepare(options)
    captures = [read_capture(path) for path in paths]
    cells = tuple(parse_cell(capture.identity.cell) for capture in captures)
    outcomes = []
    with open_session(
        replace(options, named_cells=(), matrix_cells=cells), session_options, on_cell=on_cell, launched=launched
    ) as session:
        for cell, capture in zip(cells, captures, strict=True):
            on_cell(cell, len(cells))
            started = time.monotonic()
            comparison = compare_with_capture(
                session.routed_golden(cell).run,
                session.baseline(cell).run,
                capture,
                _identity(session_options, cell),
                Expectation(frozenset(), ANOTHER_MACHINE),
                device=comparing_device(options.device_type),
            )
            outcomes.append(
                CellOutcome(
                    cell,
                    Status.PASSED if comparison.passed else Status.FAILED,
                    ANOTHER_MACHINE,
                    comparison=comparison,
                    elapsed_s=time.monotonic() - started,
                    flags=capture.environment,
                )
            )
    return build_report(outcomes, session_document(session_options), session_options.config)


def folder_name(cell: Cell) -> str:
    """The folder of a cell's capture."""
    return re.sub(r"[^a-z0-9_.=-]+", "_", str(cell).lower())


def _identity(options: SessionOptions, cell: Cell) -> Identity:
    _, batch = make_batch(cell.data, options.config, rows=options.rows, tokens=options.tokens, seed=options.seed)
    return Identity(
        weights_digest=weights_digest(options.checkpoint, options.num_layers),
        inputs_digest=batch_digest(batch),
        seed=options.seed,
        rows=options.rows,
        tokens=options.tokens,
        num_layers=options.num_layers,
        cell=str(cell),
        routing="forced",
    )
