"""Digests of many byte ranges, read by threads with a small buffer each."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from k3convert.execution.events import Advanced, EventSink, Started, ignore_event
from k3convert.execution.open_files import SourceFiles
from k3convert.numerics import digest
from k3convert.planning.plan import SourceFile

PIECE_BYTES = 1 << 20
BATCH_BYTES = 64 << 20
MAX_WORKERS = 8


class HashJob(NamedTuple):
    """One digest: ranges ``(file, offset, nbytes)`` taken one after the other."""

    key: str
    ranges: tuple[tuple[int, int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(part[2] for part in self.ranges)


def hash_jobs(
    files: Sequence[SourceFile],
    jobs: Sequence[HashJob],
    *,
    workers: int | None = None,
    on_event: EventSink = ignore_event,
) -> dict[str, str]:
    """The digests of all jobs by their keys.

    Raises:
        BadInput: a file cannot be read.
    """
    sources = SourceFiles(files)
    local = threading.local()

    def run(batch: Sequence[HashJob]) -> list[tuple[str, str]]:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(PIECE_BYTES))
        return [(job.key, _hash(sources, job, local.buffer)) for job in batch]

    out: dict[str, str] = {}
    num_workers = workers or max(1, min(MAX_WORKERS, os.cpu_count() or 1))
    try:
        with ThreadPoolExecutor(num_workers) as pool:
            batches = _batches(jobs)
            done = 0
            on_event(Started("verify", sum(job.nbytes for job in jobs), 0))
            for batch, found in zip(batches, pool.map(run, batches), strict=True):
                out.update(found)
                done += sum(job.nbytes for job in batch)
                on_event(Advanced(done))
    finally:
        sources.close()
    return out


def _batches(jobs: Sequence[HashJob]) -> list[list[HashJob]]:
    batches: list[list[HashJob]] = []
    held = BATCH_BYTES
    for job in jobs:
        if held >= BATCH_BYTES:
            batches.append([])
            held = 0
        batches[-1].append(job)
        held += job.nbytes
    return batches


def _hash(sources: SourceFiles, job: HashJob, buffer: memoryview) -> str:
    hasher = digest.new()
    for file, offset, nbytes in job.ranges:
        done = 0
        while done < nbytes:
            view = buffer[: min(len(buffer), nbytes - done)]
            sources.read_into(file, view, offset + done)
            hasher.update(view)
            done += len(view)
    return hasher.hexdigest()
