"""Runs the items of a part on threads, and journals what is finished.

Threads suffice: reading, hashing, decoding and writing all leave the interpreter lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from k3convert.errors import error_of_system
from k3convert.execution.findings import Findings
from k3convert.execution.journal import ItemResult, Journal
from k3convert.execution.open_files import DestinationFiles, SourceFiles
from k3convert.execution.operations import ItemRunner
from k3convert.execution.output_stream import OutputStream
from k3convert.planning.plan import ConversionPlan

COMMIT_BYTES = 512 << 20
COMMIT_INTERVAL_S = 1.0
POLL_S = 0.1
BUFFERS_A_WORKER = 3


@dataclass(frozen=True, slots=True)
class WorkerBuffers:
    """How many workers, and how many bytes each holds for output and for scratch."""

    num_workers: int
    piece_bytes: int
    scratch_bytes: int


Finished = tuple[int, ItemResult]
_Message = Finished | BaseException | None


class WorkerPool:
    """Workers over one list of items. Use: ``start``, then ``finished`` until it ends, then ``join``."""

    def __init__(
        self,
        plan: ConversionPlan,
        sources: SourceFiles,
        destinations: DestinationFiles,
        findings: Findings,
        buffers: WorkerBuffers,
    ) -> None:
        self._plan, self._buffers = plan, buffers
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._outputs = [OutputStream(destinations, buffers.piece_bytes) for _ in range(buffers.num_workers)]
        self.runners = [
            ItemRunner(plan, sources, output, findings, memoryview(bytearray(buffers.scratch_bytes)))
            for output in self._outputs
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(runner,), name=f"k3convert-{number}", daemon=True)
            for number, runner in enumerate(self.runners)
        ]

    def start(self, items: Iterable[int]) -> None:
        """Begin with these items, in this order."""
        for item in items:
            self._todo.put(item)
        for thread in self._threads:
            thread.start()

    def written_bytes(self) -> int:
        """Bytes written so far by all workers."""
        return sum(output.written_bytes for output in self._outputs)

    def next_message(self) -> _Message | str:
        """A finished item, an exception, None for a worker that ended, or ``"wait"`` when nothing came."""
        try:
            return self._messages.get(timeout=POLL_S)
        except queue.Empty:
            return "wait"

    def stop(self) -> None:
        """Let every worker end after its current item, and wait for them."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _work(self, runner: ItemRunner) -> None:
        try:
            while not self._stop.is_set():
                try:
                    number = self._todo.get_nowait()
                except queue.Empty:
                    break
                self._messages.put((number, runner.run(self._plan.items[number])))
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
            self._messages.put(error)
        finally:
            runner.output.close()
        self._messages.put(None)


def run_items(
    pool: WorkerPool,
    items: Sequence[int],
    journal: Journal,
    destinations: DestinationFiles,
    plan: ConversionPlan,
    findings: Findings,
    on_commit: Callable[[list[Finished]], None],
    on_tick: Callable[[], None],
) -> None:
    """Run items to the end; journal them in groups, each after its files are synced.

    Raises:
        NoSpace: the destination is full.
        K3Error: a worker failed, or ``on_tick`` raised.
    """
    pending: list[Finished] = []
    last_commit = time.monotonic()

    def commit() -> None:
        nonlocal last_commit
        if pending and not findings.any:
            destinations.sync({plan.items[number].file for number, _ in pending})
            journal.append(pending)
            on_commit(pending)
        pending.clear()
        last_commit = time.monotonic()

    running = len(pool.runners)
    try:
        pool.start(items)
        while running:
            message = pool.next_message()
            if message is None:
                running -= 1
            elif isinstance(message, BaseException):
                raise message
            elif not isinstance(message, str):
                pending.append(message)
            held = sum(plan.items[number].nbytes for number, _ in pending)
            if held >= COMMIT_BYTES or time.monotonic() - last_commit >= COMMIT_INTERVAL_S:
                commit()
            on_tick()
        commit()
    except OSError as error:
        pool.stop()
        raise error_of_system(error) from error
    except BaseException:
        pool.stop()
        commit()
        raise


def plan_buffers(
    *, num_workers: int, available_bytes: int, piece_bytes: int, least_piece_bytes: int, extra_bytes: int
) -> WorkerBuffers | None:
    """Fit buffers into ``available_bytes``: smaller pieces first, then fewer workers; None when one does not fit.

    ``extra_bytes`` is what a worker needs beside its piece whatever the piece's size.
    """
    while num_workers:
        piece = piece_bytes
        while piece >= least_piece_bytes:
            if num_workers * (BUFFERS_A_WORKER * piece + extra_bytes) <= available_bytes:
                return WorkerBuffers(num_workers, piece, piece)
            piece //= 2
        num_workers -= 1
    return None
