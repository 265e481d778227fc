"""Times the conversions against a plain copy of the same input, in turn, and writes the figures as JSON.

    python benchmarks/conversion.py --scratch /dev/shm/bench --out benchmarks/results/conversion.json

Each pair runs `cp -r SRC` and then the conversion of SRC; the first pair is discarded, the ratio is the median over
the others. A conversion's time is its own `elapsed_s`: from the first byte read to the last rename, digests on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("k3convert", "blake3", "numba", "numpy")
PIECE = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the table: what runs, on which preset, and the ratio to the reference that it must reach."""

    name: str
    preset: str
    command: tuple[str, ...]
    must: float
    aim: float


JOBS = (
    Job("hf-to-dcp packed", "large", ("hf-to-dcp",), 1.4, 1.0),
    Job("hf-to-dcp packed", "many", ("hf-to-dcp",), 3.0, 2.0),
    Job("dcp-to-hf packed", "large", ("dcp-to-hf",), 1.6, 1.0),
    Job("dcp-to-hf packed", "many", ("dcp-to-hf",), 3.5, 2.0),
    Job("hf-to-dcp bf16", "large", ("hf-to-dcp", "--experts", "bf16"), 1.6, 1.1),
)


def k3convert(*arguments: str) -> dict[str, Any]:
    """Run one command with ``--json``; its document, with the process's wall time added."""
    started = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "k3convert", *arguments, "--json", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        sys.exit(f"k3convert {' '.join(arguments)} failed:\n{run.stdout}{run.stderr}")
    document: dict[str, Any] = json.loads(run.stdout)
    return document | {"wall_s": time.perf_counter() - started}


def timed_copy(source: Path, destination: Path) -> float:
    """Seconds of ``cp -r``."""
    shutil.rmtree(destination, ignore_errors=True)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(destination)], check=True)
    elapsed = time.perf_counter() - started
    shutil.rmtree(destination)
    return elapsed


def timed_write(nbytes: int, destination: Path) -> float:
    """Seconds to write so many bytes to one new file, 1 MiB at a time."""
    started = time.perf_counter()
    with open(destination, "wb", buffering=0) as file:
        for _ in range(nbytes // len(PIECE)):
            file.write(PIECE)
    elapsed = time.perf_counter() - started
    destination.unlink()
    return elapsed


def run_job(job: Job, scratch: Path, pairs: int) -> dict[str, Any]:
    """Time a job against its reference, in turn."""
    source = scratch / job.preset
    destination = scratch / "result"
    if job.command[0] == "dcp-to-hf":
        source = scratch / f"{job.preset}-dcp"
        if not source.exists():
            k3convert("hf-to-dcp", str(scratch / job.preset), str(source))
    rows = []
    for _ in range(pairs + 1):
        shutil.rmtree(destination, ignore_errors=True)
        if "bf16" in job.command:
            reference = timed_write(decoded_bytes(source), scratch / "written")
        else:
            reference = timed_copy(source, scratch / "copy")
        document = k3convert(job.command[0], str(source), str(destination), *job.command[1:])
        rows.append(
            {
                "reference_s": round(reference, 4),
                "elapsed_s": document["elapsed_s"],
                "ratio": round(document["elapsed_s"] / reference, 3),
                "start_and_end_s": round(document["wall_s"] - document["elapsed_s"], 3),
                "peak_memory_bytes": document["peak_memory_bytes"],
                "bytes_written": document["bytes_written"],
            }
        )
        shutil.rmtree(destination)
    if source.name.endswith("-dcp"):
        shutil.rmtree(source)
    ratio = median(row["ratio"] for row in rows[1:])
    return {
        **asdict(job),
        "reference": "writing that many bytes" if "bf16" in job.command else "cp -r of the same input",
        "ratio": ratio,
        "ratio_min": min(row["ratio"] for row in rows[1:]),
        "ratio_max": max(row["ratio"] for row in rows[1:]),
        "reached": "aim" if ratio <= job.aim else "must" if ratio <= job.must else "missed",
        "pairs": rows,
    }


def decoded_bytes(source: Path) -> int:
    """Bytes that the bf16 conversion of a source writes, from its plan."""
    plan = k3convert("hf-to-dcp", str(source), str(source.with_name("no-such")), "--experts", "bf16", "--dry-run")
    return int(plan["bytes_to_write"])


def measured(command: list[str], repeats: int = 5) -> dict[str, float]:
    """Median wall seconds and largest memory of a command."""
    walls = []
    peak = 0
    for _ in range(repeats):
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed")
        walls.append(time.perf_counter() - started)
        peak = max(peak, usage.ru_maxrss * 1024)
    return {"wall_s": round(median(walls), 3), "wall_min_s": round(min(walls), 3), "peak_memory_bytes": peak}


def plan_of_release(scratch: Path) -> dict[str, Any]:
    """``--dry-run`` on the released geometry."""
    source = scratch / "release"
    if not source.exists():
        k3convert("make-tiny", str(source), "--preset", "release", "--sparse")
    figures = measured(
        [sys.executable, "-m", "k3convert", "hf-to-dcp", str(source), str(scratch / "none"), "--dry-run"], 3
    )
    return {"name": "plan of the release", "must_s": 20, "aim_s": 6, "must_bytes": 1 << 30, **figures}


def start_up() -> dict[str, Any]:
    """``k3convert --help``."""
    figures = measured([sys.executable, "-m", "k3convert", "--help"], 9)
    return {"name": "k3convert --help", "must_s": 0.3, "aim_s": 0.15, **figures}


def environment() -> dict[str, Any]:
    """Where the figures come from."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def main() -> None:
    """Run everything and write the JSON."""
    parser = argparse.ArgumentParser(description="Time the conversions against a plain copy of the same input.")
    parser.add_argument("--scratch", type=Path, required=True, help="folder on a tmpfs with 16 GB free")
    parser.add_argument("--out", type=Path, help="JSON file; default: standard output alone")
    parser.add_argument("--pairs", type=int, default=5, help="counted pairs of each job")
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    steps: list[Callable[[], dict[str, Any]]] = [start_up, lambda: plan_of_release(options.scratch)]
    for preset in ("large", "many"):
        if not (options.scratch / preset).exists():
            k3convert("make-tiny", str(options.scratch / preset), "--preset", preset)
    steps += [lambda job=job: run_job(job, options.scratch, options.pairs) for job in JOBS]  # type: ignore[misc]
    rows = []
    for step in steps:
        row = step()
        rows.append(row)
        shown = {key: row[key] for key in ("name", "preset", "ratio", "reached", "wall_s") if key in row}
        print(json.dumps(shown), flush=True)
    document = {"benchmark": "conversion", "environment": environment(), "rows": rows}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
