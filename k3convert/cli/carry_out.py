"""What both conversions share on the command line: options to a run, a plan to its execution, a report to text."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from k3convert.cli.console import Console
from k3convert.cli.progress import ProgressSink
from k3convert.errors import K3Error, UsageError, WorkerDied, error_of_system
from k3convert.execution.conversion import RunOptions, run_conversion
from k3convert.execution.memory import parse_size
from k3convert.execution.partial_folder import PartialFolder
from k3convert.execution.parts import Part, parse_part, part_of_torchrun
from k3convert.planning.plan import ConversionPlan
from k3convert.reporting.to_text import conversion_text, plan_text


def size_option(name: str, text: str) -> int:
    """Bytes of an option.

    Raises:
        UsageError: not a size.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error


def run_options(
    *, workers: int | None, memory_limit: str, overwrite: bool, resume: bool, part: str | None, finish: bool
) -> RunOptions:
    """The options of a run, with the part that torchrun or an array job gives.

    Raises:
        UsageError: options that exclude each other.
    """
    rank = part_of_torchrun()
    if rank is not None and (part is not None or finish):
        raise UsageError("--part and --finish are for job arrays; torchrun gives each rank its part itself")
    if part is not None and finish:
        raise UsageError("--finish comes after every --part, in a command of its own")
    return RunOptions(
        workers=workers,
        memory_limit=size_option("--memory-limit", memory_limit),
        overwrite=overwrite,
        resume=resume,
        part=rank or (parse_part(part) if part is not None else Part()),
        finish_only=finish,
    )


def carry_out(
    console: Console,
    destination: Path,
    options: RunOptions,
    make_plan: Callable[[], ConversionPlan],
    *,
    dry_run: bool,
) -> int:
    """Plan, then show the plan or execute it; prints the result on rank 0."""
    rank = options.part
    quiet_rank = rank.run is not None and rank.index > 0
    if quiet_rank:
        console = Console(as_json=False, quiet=True)
    partial = PartialFolder(destination)
    sink = ProgressSink(console)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if not dry_run:
            partial.check_destination(overwrite=options.overwrite)
        plan = make_plan()
        if dry_run:
            summary = plan.summary() | {"bytes_free": shutil.disk_usage(_existing(destination)).free}
            if not quiet_rank:
                console.result(summary, plan_text(summary))
            return 0
        report = run_conversion(plan, options, sink)
    except KeyboardInterrupt:
        if rank.run is not None:
            partial.check_failures(rank.run)
        raise
    except Exception as error:
        if rank.run is not None and not dry_run and not isinstance(error, WorkerDied):
            _tell_peers(partial, rank, error)
        raise
    finally:
        sink.close()
    document = report.document()
    if not quiet_rank:
        console.result(document, conversion_text(document))
    return 0


def _tell_peers(partial: PartialFolder, rank: Part, error: Exception) -> None:
    assert rank.run is not None
    if isinstance(error, OSError):
        error = error_of_system(error)
    elif not isinstance(error, K3Error):
        error = WorkerDied(repr(error))
    message = {"message": str(error), "code": error.code, "exit_code": int(error.exit_code), "hint": error.hint}
    # where the note cannot be written, the launcher still ends the others
    with suppress(OSError):
        if partial.destination.parent.is_dir():
            partial.fail(rank.run, rank.index, message)


def _existing(path: Path) -> Path:
    """The path itself or its nearest parent that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
