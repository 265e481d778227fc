"""``verify-parity`` as one function: options in, report out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from k3convert.checkpoint.hub import resolve_source
from k3convert.errors import ExitCode, NotPossibleHere, UsageError
from k3convert.loading.checked_source import open_checked
from k3convert.parity.cells import Cell, Precision
from k3convert.parity.outcome import CellOutcome, Status
from k3convert.parity.report.build import build_report
from k3convert.parity.report.document import ParityReport, SessionDocument
from k3convert.parity.run_pools import RunPools
from k3convert.parity.run_spec import Level
from k3convert.parity.session import ParitySession, SessionOptions
from k3convert.parity.weights_digest import weights_digest
from k3convert.ranks.launched import LaunchedRanks
from k3model.census import census

# Of the memory: weights and gradients of a golden run in float64 may take this part of it.
GOLDEN_SHARE = 0.45
BYTES_OF_GOLDEN = 16
# A network with more values than this has its large gradients sampled: so many elements of each.
WHOLE_GRADIENTS = 1 << 30
SAMPLED_GRADIENT = 1 << 22
INTERRUPTED = "the session was interrupted before"
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What ``verify-parity`` was asked.

    Attributes:
        checkpoint: folder, or hub id in the local cache.
        matrix_cells: cells of a matrix; those that cannot run here are listed as not run.
        named_cells: cells that were asked for one by one; one that cannot be is an error.
        device_type: ``cpu``, ``cuda`` or ``npu``.
        rows: of the global batch.
        tokens: of a row.
        seed: of the batch.
        num_layers: only the first layers, or all.
        level: how far errors travel.
        deterministic: only deterministic algorithms and collectives.
        fault: planted into every candidate.
        perturbs: move every candidate's embeddings by one unit in the last place.
        timeout_s: of one run of one cell.
    """

    checkpoint: str
    matrix_cells: tuple[Cell, ...] = ()
    named_cells: tuple[Cell, ...] = ()
    device_type: str = "cpu"
    rows: int = 4
    tokens: int = 96
    seed: int = 0
    num_layers: int | None = None
    level: Level = Level.MODEL
    deterministic: bool = False
    fault: str | None = None
    perturbs: bool = False
    timeout_s: float = 600.0


def verify_parity(
    options: VerifyOptions,
    *,
    on_cell: Callable[[Cell, int], None] = lambda cell, total: None,
    launched: LaunchedRanks | None = None,
) -> ParityReport:
    """Run cells and report on them.

    Args:
        options: what to run.
        on_cell: hears of every cell before it runs, and how many there are.
        launched: ranks of a launcher, where it started this process.

    Raises:
        NotPossibleHere: the device is not there.
        UsageError: a named cell can mean nothing.
        BadInput: the checkpoint is wrong.
    """
    session_options = prepare(options)
    outcomes: list[CellOutcome] = []
    try:
        with open_session(options, session_options, on_cell=on_cell, launched=launched) as session:
            outcomes.extend(session.run(cells_of(options)))
    except KeyboardInterrupt:
        # What was found so far is worth as much as before; the rest is said not to have run.
        judged = {str(outcome.cell) for outcome in outcomes}
        outcomes += [
            CellOutcome(cell, Status.NOT_RUN, INTERRUPTED) for cell in cells_of(options) if str(cell) not in judged
        ]
    return build_report(outcomes, session_document(session_options), session_options.config)


def was_interrupted(report: ParityReport) -> bool:
    """Whether cells were left out because the user, or the system on its behalf, ended the session."""
    return any(cell.reason == INTERRUPTED for cell in report.cells)


def prepare(options: VerifyOptions) -> SessionOptions:
    """Open the checkpoint, and settle what all cells share.

    Raises:
        NotPossibleHere: the device is not there.
        BadInput: the checkpoint is wrong.
    """
    check_device(options.device_type)
    folder = resolve_source(options.checkpoint, download=False)
    config = open_checked(folder, num_layers=options.num_layers).config
    num_values = sum(prod(spec.shapes[0]) for spec in census(config, packed=False))
    return SessionOptions(
        checkpoint=folder,
        config=config,
        device_type=options.device_type,
        rows=options.rows,
        tokens=options.tokens,
        seed=options.seed,
        num_layers=options.num_layers,
        level=options.level,
        deterministic=options.deterministic,
        fault=options.fault,
        perturbs=options.perturbs,
        golden=_golden_precision(num_values, options.device_type),
        sample_above=SAMPLED_GRADIENT if _samples(options, num_values) else None,
    )


@contextmanager
def open_session(
    options: VerifyOptions,
    session_options: SessionOptions,
    *,
    on_cell: Callable[[Cell, int], None],
    launched: LaunchedRanks | None,
) -> Iterator[ParitySession]:
    """A session with its pools, once every cell that was asked for by name has been looked at.

    Raises:
        UsageError: a named cell can mean nothing.
    """
    total = len(cells_of(options))
    with RunPools(
        options.device_type, deterministic=options.deterministic, timeout_s=options.timeout_s, launched=launched
    ) as pools:
        session = ParitySession(session_options, pools, on_cell=lambda cell: on_cell(cell, total))
        for cell in options.named_cells:
            session.check(cell)
        yield session


def cells_of(options: VerifyOptions) -> tuple[Cell, ...]:
    """Named cells and those of the matrix, each once.

    Raises:
        UsageError: there are none.
    """
    cells = (*options.named_cells, *options.matrix_cells)
    if not cells:
        raise UsageError("no cell to run", hint="name one with --cell, or a matrix with --matrix")
    return tuple({str(cell): cell for cell in cells}.values())


def exit_code_of(report: ParityReport) -> ExitCode:
    """What a report tells the shell: a failed comparison before a dead rank, and a run of nothing is no pass."""
    counts = report.counts
    if was_interrupted(report):
        return ExitCode.INTERRUPTED
    if counts.get(str(Status.FAILED)) or counts.get(str(Status.NONDETERMINISTIC)):
        return ExitCode.VERDICT_NO
    if counts.get(str(Status.DIED)):
        return ExitCode.WORKER_DIED
    if counts.get(str(Status.REFUSED)):
        return ExitCode.BAD_INPUT
    return ExitCode.DONE if counts.get(str(Status.PASSED)) else ExitCode.NOT_POSSIBLE_HERE


def session_document(options: SessionOptions) -> SessionDocument:
    """What all cells share, with the digest of the weights."""
    return SessionDocument(
        checkpoint=str(options.checkpoint),
        weights_digest=weights_digest(options.checkpoint, options.num_layers),
        seed=options.seed,
        rows=options.rows,
        tokens=options.tokens,
        num_layers=options.num_layers,
        level=str(options.level),
        device=options.device_type,
        golden_dtype=str(options.golden),
        pins_shapes=options.pins_shapes,
        deterministic=options.deterministic,
        fault=options.fault,
        perturbs=options.perturbs,
    )


def check_device(device_type: str) -> None:
    """Refuse a device that is not there.

    Raises:
        NotPossibleHere: torch finds none; for ``npu`` that may be because torch_npu is not installed.
    """
    if device_type == "cpu":
        return
    if not hasattr(torch, device_type) or not torch.get_device_module(device_type).is_available():
        hint = "torch_npu provides it" if device_type == "npu" else "a CUDA build of torch and a driver provide it"
        raise NotPossibleHere(f"--device {device_type}: torch {torch.__version__} finds no such device", hint=hint)


def _samples(options: VerifyOptions, num_values: int) -> bool:
    """Whether gradients are too many to be carried whole from the device and compared for every cell."""
    is_one_rank = all(cell.layout.world_size == 1 for cell in cells_of(options))
    return is_one_rank and num_values > WHOLE_GRADIENTS


def _golden_precision(num_values: int, device_type: str) -> Precision:
    fits = num_values * BYTES_OF_GOLDEN <= GOLDEN_SHARE * _memory_bytes(device_type)
    return Precision.FP64 if fits else Precision.FP32


def _memory_bytes(device_type: str) -> int:
    if device_type != "cpu":
        free, _ = torch.get_device_module(device_type).mem_get_info()
        return int(free)
    if not _MEMINFO.exists():
        return 1 << 62
    lines = _MEMINFO.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
