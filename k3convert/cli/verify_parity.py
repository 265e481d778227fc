"""``k3convert verify-parity``."""

from __future__ import annotations

import os
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3convert.cli.console import Console
from k3convert.cli.options import AsJson, Debug, Quiet, Verbose
from k3convert.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from k3convert.parity.cells import Cell

NAME = "verify-parity"


class Device(StrEnum):
    """Where cells run."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


class MatrixName(StrEnum):
    """Which cells."""

    SMOKE = "smoke"
    PAIRWISE = "pairwise"
    FULL = "full"


class LevelName(StrEnum):
    """How far errors travel before they are compared."""

    OP = "op"
    LAYER = "layer"
    MODEL = "model"
    TRAIN = "train"


class Perturbation(StrEnum):
    """What is moved on purpose."""

    ULP = "1ulp"


def command(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="HF or DCP folder, or a hub id in the local cache.")
    ],
    matrix: Annotated[
        MatrixName | None,
        typer.Option(help="smoke: one factor at a time; pairwise: every pair of factors; full: all. Default: smoke."),
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option("--cell", metavar="CELL", help="For example sp=2,ep=2,impl.kda=fla,dtype=bf16,data=packed."),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where cells run.")] = Device.CPU,
    seq: Annotated[int, typer.Option("--seq", min=8, metavar="N", help="Tokens of a row, images expanded.")] = 96,
    batch: Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Rows of the global batch.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the batch.")] = 0,
    num_layers: Annotated[
        int | None, typer.Option("--num-layers", min=1, metavar="N", help="Load the first layers only.")
    ] = None,
    level: Annotated[LevelName, typer.Option(help="How far errors travel before they are compared.")] = LevelName.MODEL,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="DIR", help="Write report.json, report.html and junit.xml there."),
    ] = None,
    capture: Annotated[
        Path | None, typer.Option("--capture", metavar="DIR", help="Write captures for another machine; judge nothing.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="DIR", help="Judge the captures of another machine.")
    ] = None,
    inject: Annotated[
        str | None, typer.Option("--inject", metavar="FAULT", help="Plant a fault into every candidate.")
    ] = None,
    perturb: Annotated[
        Perturbation | None, typer.Option(help="Move every candidate's embeddings: how much do layers amplify it?")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Allow only deterministic algorithms and collectives.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1, metavar="S", help="Seconds for one run.")] = 600.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> int:
    """Run the network forward and backward in many ways, and say bitwise or within what tolerance.

    Every cell is compared with the eager network on one rank in the same dtype, and both with a float64 run.
    """
    from k3convert.parity.capturing import capture_cells, compare_captures
    from k3convert.parity.cells import parse_cell
    from k3convert.parity.matrix import Matrix, matrix_cells
    from k3convert.parity.report.files import write_report
    from k3convert.parity.run_spec import Level
    from k3convert.parity.verify import VerifyOptions, exit_code_of, verify_parity
    from k3convert.ranks.launched import LaunchedRanks, launched_world_size
    from k3convert.reporting.captures_text import captures_text
    from k3convert.reporting.parity_text import parity_text

    if capture is not None and against is not None:
        raise UsageError("--capture writes what --against reads; give one of them")

    named = tuple(parse_cell(text) for text in cell or ())
    chosen = matrix or (None if named else MatrixName.SMOKE)
    options = VerifyOptions(
        checkpoint=checkpoint,
        matrix_cells=matrix_cells(Matrix(chosen)) if chosen is not None else (),
        named_cells=named,
        device_type=device.value,
        rows=batch,
        tokens=seq,
        seed=seed,
        num_layers=num_layers,
        level=Level(level.value),
        deterministic=deterministic,
        fault=inject,
        perturbs=perturb is not None,
        timeout_s=timeout,
    )
    launched = LaunchedRanks(device.value, timeout_s=timeout) if launched_world_size() else None
    if launched is not None and launched.rank > 0:
        launched.serve()
        os._exit(0)
    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    num_done = 0

    def on_cell(cell: Cell, total: int) -> None:
        nonlocal num_done
        num_done += 1
        console.progress(f"[{num_done}/{total}] {cell}")

    if capture is not None:
        captured = capture_cells(options, capture, on_cell=on_cell, launched=launched)
    elif against is not None:
        result = compare_captures(options, against, on_cell=on_cell, launched=launched)
    else:
        result = verify_parity(options, on_cell=on_cell, launched=launched)
    if launched is not None:
        launched.close()
    if capture is not None:
        console.result(captured.document(), captures_text(captured.document()))
        return ExitCode.DONE if captured.captured else ExitCode.NOT_POSSIBLE_HERE
    if report is not None:
        write_report(result, report)
        console.note(f"the report is in {report}")
    document = result.model_dump(mode="json")
    console.result(document, parity_text(document))
    return exit_code_of(result)
