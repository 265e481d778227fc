"""A pool of ranks that lives through many jobs and judges each by what its ranks answer."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from k3convert.errors import K3Error, WorkerDied

START_S = 120.0
# A failed rank leaves the others waiting for it in a collective: this long they may take to say what they saw.
GRACE_S = 2.0
# From the signal that asks a silent rank for its stack to the stack in its file.
STACK_S = 1.0
LOG_TAIL_BYTES = 4000


class RanksFailed(WorkerDied):
    """Ranks raised or died. The offenders are one line a rank, the cause is the first one's traceback."""

    code = "rank-failed"


class RanksSilent(WorkerDied):
    """Ranks did not answer in time. The offenders are one line a rank, the cause is where the first one hangs."""

    code = "rank-silent"


class RankPool:
    """Runs a function on every rank of one process group.

    Ranks are processes of this host, started at the first job. A rank that fails alone, dies or does not answer in
    time takes the pool down, since others may wait for it in a collective; the next job starts new ranks. Where all
    ranks refuse a job alike, the pool lives on. Ranks leave without torch's own ending, which aborts correct gloo
    processes now and then: what they answered is what counts.

    Args:
        world_size: how many ranks.
        device_type: ``cpu`` (gloo), ``cuda`` (nccl) or ``npu`` (hccl).
        environment: variables of the ranks, on top of this process's.
    """

    def __init__(
        self, world_size: int, *, device_type: str = "cpu", environment: Mapping[str, str] | None = None
    ) -> None:
        self.world_size = world_size
        self.device_type = device_type
        self.environment = dict(environment or {})
        self._folder = tempfile.TemporaryDirectory(prefix="k3ranks-")
        self._workers: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._num_starts = 0

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the ranks that run, in rank order; empty before the first job and after a failed one."""
        return tuple(worker.pid for worker in self._workers)

    def run(self, entry: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float) -> list[Any]:
        """What a function returned on every rank, in rank order.

        Args:
            entry: ``package.module:function`` or ``path/of/file.py:function``.
            arguments: its keyword arguments; they are pickled, and so is what comes back.
            timeout_s: how long all ranks together may take.

        Raises:
            RanksFailed: ranks raised or died.
            RanksSilent: ranks did not answer in time.
            K3Error: all ranks raised the same error of its kind; it is raised again as it was.
        """
        if not self._workers:
            self._start()
        for connection in self._connections:
            with suppress(OSError):  # a rank that is gone shows when its answer is read
                connection.send_bytes(pickle.dumps((entry, dict(arguments or {}))))
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        faults: dict[int, str] = {}
        silent: list[int] = []
        for rank, connection in enumerate(self._connections):
            patience = GRACE_S if faults else max(0.0, deadline - time.monotonic())
            if not connection.poll(patience):
                silent.append(rank)
                faults[rank] = "no answer"
                continue
            try:
                verdict, answer, error = pickle.loads(connection.recv_bytes())  # noqa: S301 - of our own child
            except (EOFError, OSError):
                faults[rank] = self._death(rank)
                continue
            if verdict == "failed":
                faults[rank] = answer
                if error is not None:
                    errors[rank] = error
            else:
                answers[rank] = answer
        if not faults:
            return [answers[rank] for rank in range(self.world_size)]
        all_refused = (
            len(faults) == self.world_size
            and not silent
            and not any(text.startswith("died") for text in faults.values())
        )
        stacks = self._stacks(silent)
        if not all_refused:
            self.close()
        if all_refused and len(errors) == self.world_size and len({str(error) for error in errors.values()}) == 1:
            raise errors[0]
        raise self._failure(faults, silent, stacks, timeout_s)

    def close(self) -> None:
        """Let the ranks go; whoever does not leave is killed."""
        for connection in self._connections:
            connection.close()
        for worker in self._workers:
            try:
                worker.wait(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._workers, self._connections = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._folder.cleanup()

    def _start(self) -> None:
        self._num_starts += 1
        folder = Path(self._folder.name) / str(self._num_starts)
        folder.mkdir()
        key = secrets.token_bytes(16)
        variables = os.environ | {"OMP_NUM_THREADS": "1", "K3_RANKS_KEY": key.hex()} | self.environment
        with Listener(str(folder / "answers"), backlog=self.world_size, authkey=key) as listener:
            for rank in range(self.world_size):
                command = [
                    sys.executable, "-m", "k3convert.ranks.worker",
                    str(folder), str(rank), str(self.world_size), self.device_type,
                ]  # fmt: skip
                with (folder / f"rank{rank}.log").open("wb") as log:
                    self._workers.append(subprocess.Popen(command, env=variables, stderr=log))
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
            found: dict[int, Connection] = {}
            try:
                while len(found) < self.world_size:
                    connection = listener.accept()
                    found[int(connection.recv_bytes())] = connection
            except (OSError, EOFError) as error:
                missing = [rank for rank in range(self.world_size) if rank not in found]
                reasons = [f"rank {rank}: {self._death(rank)}" for rank in missing]
                self.close()
                raise RanksFailed(
                    f"{len(missing)} of {self.world_size} ranks did not start within {START_S:.0f} s", offenders=reasons
                ) from error
        self._connections = [found[rank] for rank in range(self.world_size)]

    def _file(self, rank: int, kind: str) -> str:
        path = Path(self._folder.name) / str(self._num_starts) / f"rank{rank}.{kind}"
        return path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() if path.exists() else ""

    def _death(self, rank: int) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._workers[rank].wait(timeout=GRACE_S)
        code = self._workers[rank].poll()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        log = self._file(rank, "log")
        return f"died ({how})" + (f"\n{log}" if log else "")

    def _stacks(self, silent: list[int]) -> dict[int, str]:
        """Where silent ranks are, as faulthandler sees it."""
        for rank in silent:
            self._workers[rank].send_signal(signal.SIGUSR1)
        if silent:
            time.sleep(STACK_S)
        return {rank: self._file(rank, "stack") for rank in silent}

    def _failure(
        self, faults: Mapping[int, str], silent: list[int], stacks: Mapping[int, str], timeout_s: float
    ) -> K3Error:
        offenders = [f"rank {rank}: {fault.strip().splitlines()[-1]}" for rank, fault in faults.items()]
        spoke = [rank for rank in faults if rank not in silent]
        if not spoke:
            return RanksSilent(
                f"{len(silent)} of {self.world_size} ranks did not answer within {timeout_s:.0f} s",
                offenders=offenders,
                cause=f"rank {silent[0]} is here:\n{stacks[silent[0]] or 'no stack could be had'}",
            )
        return RanksFailed(
            f"{len(spoke)} of {self.world_size} ranks failed", offenders=offenders, cause=faults[spoke[0]].strip()
        )
