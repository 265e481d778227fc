"""Carries a conversion plan out, from the claim of ``DST.partial`` to the final name."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3convert.errors import NoSpace, UsageError, error_of_system
from k3convert.execution.dcp_finish import finish_dcp
from k3convert.execution.events import Advanced, Ended, EventSink, Noted, Started, ignore_event
from k3convert.execution.findings import Findings
from k3convert.execution.journal import Journal, JournalReader
from k3convert.execution.memory import DEFAULT_LIMIT_BYTES, format_size, peak_resident_bytes, resident_bytes
from k3convert.execution.open_files import DestinationFiles, SourceFiles
from k3convert.execution.partial_folder import PartialFolder
from k3convert.execution.parts import Part
from k3convert.execution.workers import BUFFERS_A_WORKER, Finished, WorkerBuffers, WorkerPool, plan_buffers, run_items
from k3convert.planning.hf_to_dcp import DcpFinish, no_garbage_collection
from k3convert.planning.plan import ConversionPlan, Decode, DecodeGathered, Encode, Gather
from k3convert.version import __version__

PIECE_BYTES = 1 << 20
LEAST_PIECE_BYTES = 64 << 10
RESERVE_BYTES = 16 << 20
CODEC_OPS = (Decode, DecodeGathered, Gather, Encode)
MAX_DEFAULT_WORKERS = 8
SMALL_OP_BYTES = 128 << 10
READY_TIMEOUT_S = 600.0
PEER_CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a plan is carried out; none of this changes a byte of the result."""

    workers: int | None = None
    memory_limit: int = DEFAULT_LIMIT_BYTES
    overwrite: bool = False
    resume: bool = True
    part: Part = field(default_factory=Part)
    finish_only: bool = False


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What was done."""

    job: str
    source: str
    destination: str
    complete: bool
    elapsed_s: float
    bytes_written: int
    resumed_bytes: int
    num_workers: int
    peak_memory_bytes: int
    counts: Mapping[str, int]
    notes: tuple[str, ...]
    details: Mapping[str, Any]

    def document(self) -> dict[str, Any]:
        """The report as JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {"notes": list(self.notes)}


def run_conversion(plan: ConversionPlan, options: RunOptions, on_event: EventSink = ignore_event) -> ConversionReport:
    """Carry a plan out: all of it, or one part.

    Raises:
        NoSpace, DestinationExists, ResumeRefused, BadInput, WorkerDied: see the classes; the destination's final name
            is taken only by a complete result.
    """
    with no_garbage_collection():
        return _Conversion(plan, options, on_event).run()


class _Conversion:
    def __init__(self, plan: ConversionPlan, options: RunOptions, on_event: EventSink) -> None:
        self.plan, self.options, self.on_event = plan, options, on_event
        self.part = options.part
        self.partial = PartialFolder(Path(plan.destination))
        self.reader = JournalReader(self.partial.folder)
        self.findings = Findings()
        self.started_at: float | None = None
        self.resumed_bytes = 0
        self.num_workers = 0
        self.details: dict[str, Any] = {}
        self._peers_checked = 0.0

    def run(self) -> ConversionReport:
        """Claim, write, finish, publish."""
        for note in self.plan.notes:
            self.on_event(Noted(note))
        self.partial.check_destination(overwrite=self.options.overwrite)
        buffers = None if self.options.finish_only else self._prepared_buffers()
        try:
            self._claim()
            self.reader.read_new()
            if buffers is not None:
                self._write_part(buffers)
            complete = self._complete_and_publish()
        finally:
            self.partial.release()
        elapsed = time.perf_counter() - self.started_at if self.started_at else 0.0
        self.on_event(Ended(elapsed))
        return self._report(complete, elapsed)

    def _claim(self) -> None:
        part, run = self.part, self.part.run
        self._check_space()
        if part.count > 1 and not self.options.resume:
            raise UsageError(f"--no-resume with several parts: remove {self.partial.folder} first, then start them all")
        if run is not None and part.index > 0:
            self.partial.wait_ready(run, READY_TIMEOUT_S)
        if self.options.finish_only and not self.partial.result.is_dir():
            raise UsageError(f"--finish: there is no {self.partial.folder}", hint="run every --part I/N first")
        self.partial.claim(self._identity(), resume=self.options.resume)
        self.partial.lock(part.name)
        if run is not None and part.index == 0:
            self.partial.forget_failures(run)
            self.partial.mark_ready(run)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a partial result to be continued."""
        plan = self.plan
        return {
            "job": plan.job,
            "version": __version__,
            "options": dict(plan.options),
            "sources": {file.path: {"nbytes": file.nbytes, "state": file.fingerprint} for file in plan.sources},
            "files": {file.name: file.nbytes for file in plan.files},
            "num_items": len(plan.items),
        }

    def _check_space(self) -> None:
        parent = Path(self.plan.destination).parent
        if not parent.is_dir():
            raise UsageError(f"{parent} is not a folder")
        free = shutil.disk_usage(parent).free
        needed = self.plan.bytes_needed - (self.partial.used_bytes() if self.partial.folder.is_dir() else 0)
        if needed > free:
            raise NoSpace(
                f"{parent} has {format_size(free)} free, the result needs {format_size(needed)} more "
                f"({free} and {needed} bytes)"
            )

    def _write_part(self, buffers: WorkerBuffers) -> None:
        plan = self.plan
        mine = self.part.items(plan.items)
        todo = [number for number in mine if number not in self.reader.done]
        total = sum(plan.items[number].nbytes for number in mine)
        self.resumed_bytes = total - sum(plan.items[number].nbytes for number in todo)
        todo.sort(key=lambda number: -plan.items[number].nbytes if plan.items[number].nbytes > 1 << 30 else 0)
        self.num_workers = buffers.num_workers
        sources, destinations = SourceFiles(plan.sources), DestinationFiles(self.partial.result, plan.files)
        journal = Journal(self.partial.folder, self.part.name)
        pool = WorkerPool(plan, sources, destinations, self.findings, buffers)
        self.on_event(Started(plan.job, total, self.resumed_bytes))
        self.started_at = time.perf_counter()

        def tick() -> None:
            self.on_event(Advanced(self.resumed_bytes + pool.written_bytes()))
            self._check_peers()

        try:
            run_items(pool, todo, journal, destinations, plan, self.findings, self._committed, tick)
        finally:
            journal.close()
            sources.close()
            destinations.close()
        if error := self.findings.error():
            if self.part.count == 1:
                self.partial.discard()  # the source must change before a run can succeed: there is nothing to resume
            raise error

    def _committed(self, finished: list[Finished]) -> None:
        for item, result in finished:
            self.reader.add(item, result)

    def _check_peers(self) -> None:
        run = self.part.run
        if run is not None and time.monotonic() - self._peers_checked > PEER_CHECK_S:
            self._peers_checked = time.monotonic()
            self.partial.check_failures(run)

    def _default_workers(self) -> int:
        """One a core, at most eight; one alone where tensors are so small that threads would wait for each other."""
        cores = max(1, min(MAX_DEFAULT_WORKERS, (os.cpu_count() or 1) // self.part.local_count))
        num_ops = sum(len(item.ops) for item in self.plan.items)
        return cores if self.plan.bytes_to_write >= SMALL_OP_BYTES * num_ops else 1

    def _uses_codec(self) -> bool:
        return any(isinstance(op, CODEC_OPS) for item in self.plan.items for op in item.ops)

    def _prepared_buffers(self) -> WorkerBuffers:
        """Load what the plan needs and share out the memory that is left, before anything is claimed.

        Raises:
            UsageError: the memory limit is too small.
        """
        if self._uses_codec():
            _load_codec()
        local = self.part.local_count
        workers = self.options.workers or self._default_workers()
        extra = self.plan.counts.get("largest_matrix_bytes", 0)
        limit = self.options.memory_limit // local
        fixed = resident_bytes() + RESERVE_BYTES
        buffers = plan_buffers(
            num_workers=workers,
            available_bytes=limit - fixed,
            piece_bytes=PIECE_BYTES,
            least_piece_bytes=LEAST_PIECE_BYTES,
            extra_bytes=extra,
        )
        if buffers is None:
            raise UsageError(
                f"--memory-limit {format_size(self.options.memory_limit)} is too small here: this plan needs "
                f"{format_size((fixed + BUFFERS_A_WORKER * LEAST_PIECE_BYTES + extra) * local)}"
            )
        return buffers

    def _complete_and_publish(self) -> bool:
        """Finish and publish, when every part is done and this process is the one to do it."""
        plan, part = self.plan, self.part
        waits = part.run is not None
        if part.count > 1 and not self.options.finish_only and (part.index > 0 or not waits):
            return False
        while len(self.reader.done) < len(plan.items):
            self.reader.read_new()
            if len(self.reader.done) >= len(plan.items):
                break
            if not waits:
                missing = len(plan.items) - len(self.reader.done)
                raise UsageError(
                    f"--finish: {missing} of {len(plan.items)} items are not written yet",
                    hint="run the missing --part I/N",
                )
            self._check_peers()
            time.sleep(0.05)
        if self.started_at is None:
            self.started_at = time.perf_counter()
        finish = finish_dcp if isinstance(plan.finish, DcpFinish) else _finish_hf
        try:
            self.details = finish(plan, self.partial.result, self.reader.digests)
            self.partial.publish(overwrite=self.options.overwrite)
        except OSError as error:
            raise error_of_system(error) from error
        return True

    def _report(self, complete: bool, elapsed: float) -> ConversionReport:
        details = dict(self.details)
        if self.reader.figures is not None:
            details["mxfp4"] = self.reader.figures.document()
        return ConversionReport(
            job=self.plan.job,
            source=self.plan.source,
            destination=self.plan.destination if complete else str(self.partial.folder),
            complete=complete,
            elapsed_s=round(elapsed, 4),
            bytes_written=self.plan.bytes_to_write,
            resumed_bytes=self.resumed_bytes,
            num_workers=self.num_workers,
            peak_memory_bytes=peak_resident_bytes(),
            counts=self.plan.counts,
            notes=self.plan.notes,
            details=details,
        )


def _load_codec() -> None:
    """Load the compiled kernels (or compile them, once a machine), before the clock starts and threads need them."""
    import k3convert.execution.encoding
    import k3convert.numerics.compiled_decode
    import k3convert.numerics.compiled_elements
    import k3convert.numerics.compiled_encode  # noqa: F401


def _finish_hf(plan: ConversionPlan, result: Path, digests: Mapping[int, str]) -> dict[str, Any]:
    from k3convert.execution.hf_finish import finish_hf

    return finish_hf(plan, result, digests)
