"""Pools of gloo processes, one a world size, that live through many tests."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
JOBS = HERE / "jobs.py"
START_S = 60.0


class WorkerPool:
    """Runs functions of a file on every rank of one process group, and judges by what each rank answers.

    A rank that fails alone or does not answer in time takes the pool down: the others may wait in a collective for it.
    The next job starts a new pool. Where all ranks refuse a job alike, the pool lives on.
    """

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self.folder = folder
        self.workers: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.num_starts = 0

    def run(self, job: str, *, jobs: Path = JOBS, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        """What the job returned on every rank, in rank order.

        Raises:
            RuntimeError: ranks failed; with each traceback.
            TimeoutError: ranks did not answer in time.
        """
        if not self.workers:
            self._start()
        for connection in self.connections:
            connection.send_bytes(pickle.dumps((jobs, job, arguments)))
        deadline = time.monotonic() + timeout_s
        answers: list[Any] = []
        faults: dict[int, str] = {}
        for rank, connection in enumerate(self.connections):
            # A failed rank leaves the others waiting for it: they get a moment to say what they saw.
            patience = 2.0 if faults else max(0.0, deadline - time.monotonic())
            if not connection.poll(patience):
                faults[rank] = "no answer"
                continue
            try:
                verdict, answer = pickle.loads(connection.recv_bytes())
            except EOFError:
                faults[rank] = "died"
                continue
            if verdict == "failed":
                faults[rank] = answer
            answers.append(answer)
        if faults:
            if len(answers) < self.world_size or len(faults) < self.world_size:
                self.close()
            text = "\n".join(f"rank {rank}: {fault}" for rank, fault in faults.items())
            raise (TimeoutError if set(faults.values()) == {"no answer"} else RuntimeError)(text)
        return answers

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for worker in self.workers:
            try:
                worker.wait(timeout=2)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.workers, self.connections = [], []

    def _start(self) -> None:
        self.num_starts += 1
        address = self.folder / f"pool{self.num_starts}"
        rendezvous = self.folder / f"rendezvous{self.num_starts}"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with Listener(str(address), backlog=self.world_size) as listener:
            for rank in range(self.world_size):
                command = [HERE / "worker.py", address, rank, self.world_size, rendezvous]
                self.workers.append(
                    subprocess.Popen([sys.executable, *(str(part) for part in command)], env=environment)
                )
            listener._listener._socket.settimeout(START_S)
            found: dict[int, Connection] = {}
            while len(found) < self.world_size:
                connection = listener.accept()
                found[pickle.loads(connection.recv_bytes())] = connection
        self.connections = [found[rank] for rank in range(self.world_size)]


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], WorkerPool]]:
    """The pool of a world size."""
    pools: dict[int, WorkerPool] = {}

    def get(world_size: int) -> WorkerPool:
        if world_size not in pools:
            pools[world_size] = WorkerPool(world_size, tmp_path_factory.mktemp(f"pool{world_size}"))
        return pools[world_size]

    yield get
    for opened in pools.values():
        opened.close()
