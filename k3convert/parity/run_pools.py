"""Runs cells on pools of ranks, one pool a world size, and keeps what they recorded until the session ends."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3convert.parity.pinned_shapes import ProductShape
from k3convert.parity.records import Run
from k3convert.parity.run_spec import RankAnswer, RunSpec
from k3convert.ranks import RankPool
from k3convert.ranks.launched import LaunchedRanks

RANK_RUN = "k3convert.parity.rank_run"
# Memory-backed where there is one: a run of a tiny network writes a hundred megabytes that live for a second.
_SHARED_MEMORY = Path("/dev/shm")
# Triton's products of float32 tiles are TF32 unless told otherwise; torch's are not either, see ``rank_run``.
ARITHMETIC_ENVIRONMENT = {"TRITON_F32_DEFAULT": "ieee"}
DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Tree",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_NCHANNELS": "1",
    "HCCL_DETERMINISTIC": "true",
}


@dataclass(frozen=True, slots=True)
class Finished:
    """A run and what its ranks said."""

    run: Run
    answers: tuple[RankAnswer, ...]

    @property
    def unsteady(self) -> tuple[str, ...]:
        """Tensors that had other bits when the step was repeated, on any rank."""
        return tuple(sorted({name for answer in self.answers for name in answer.unsteady}))

    @property
    def products(self) -> frozenset[ProductShape]:
        """Matrix products of all ranks."""
        return frozenset().union(*(answer.products for answer in self.answers))


class RunPools:
    """One pool a world size, that lives through many runs.

    Args:
        device_type: ``cpu``, ``cuda`` or ``npu``.
        deterministic: whether ranks start with the environment of deterministic collectives.
        timeout_s: how long one run may take.
        launched: ranks of a launcher, for cells of their number; other cells of several ranks cannot run then.
    """

    def __init__(
        self, device_type: str, *, deterministic: bool, timeout_s: float, launched: LaunchedRanks | None = None
    ) -> None:
        self.device_type = device_type
        self.launched = launched
        self.timeout_s = timeout_s
        self._environment = ARITHMETIC_ENVIRONMENT | (DETERMINISTIC_ENVIRONMENT if deterministic else {})
        self._pools: dict[int, RankPool] = {}
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        self._scratch = Path(tempfile.mkdtemp(prefix="k3parity-", dir=parent))
        self._num_runs = 0

    def run(self, spec: RunSpec) -> Finished:
        """Run a cell; where its records go is filled in here.

        Raises:
            RanksFailed, RanksSilent: ranks failed, or did not answer in time.
            K3Error: all ranks refused alike.
        """
        self._num_runs += 1
        folder = self._scratch / str(self._num_runs)
        folder.mkdir()
        answers = self._on_ranks(spec.cell.layout.world_size, "run_cell", spec=replace(spec, folder=str(folder)))
        return Finished(Run(folder), tuple(answers))

    def probe(self, products: frozenset[ProductShape]) -> tuple[ProductShape, ...]:
        """The products that padding does not pin here."""
        found: tuple[ProductShape, ...] = self._on_ranks(1, "probe", shapes=products, device_type=self.device_type)[0]
        return found

    def forget(self, finished: Finished) -> None:
        """Remove what a run recorded."""
        shutil.rmtree(finished.run.folder, ignore_errors=True)

    def __enter__(self) -> RunPools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.__exit__()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _on_ranks(self, world_size: int, function: str, **arguments: Any) -> list[Any]:
        if self.launched is not None and self.launched.world_size == world_size:
            return self.launched.run(f"{RANK_RUN}:{function}", arguments, timeout_s=self.timeout_s)
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, device_type=self.device_type, environment=self._environment)
        return self._pools[world_size].run(f"{RANK_RUN}:{function}", arguments, timeout_s=self.timeout_s)
