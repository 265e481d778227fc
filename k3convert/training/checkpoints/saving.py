"""Writes steps through DCP, while training goes on where that is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from k3convert.training.checkpoints import step_folders


class Saver:
    """Saves the steps of a run, one at a time.

    Args:
        out: the run's folder.
        keep: complete steps that stay; 0 keeps all.
        asynchronous: copy the state, and write it in a thread of its own.
        facts: what every step's marker says.
    """

    def __init__(self, out: Path, *, keep: int, asynchronous: bool, facts: Mapping[str, Any]) -> None:
        self.out, self.keep, self.asynchronous, self.facts = out, keep, asynchronous, facts
        # Its collectives must not meet those of training, and work on host memory.
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[int, Future[Any]] | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin to save a step, after the one before is complete. A collective."""
        self.wait()
        path = step_folders.growing_path(self.out, step)
        if dist.get_rank() == 0:
            step_folders.begin(self.out, step)
        dist.barrier(group=self._group)
        if self.asynchronous:
            future = async_save(state, checkpoint_id=path, process_group=self._group)
            assert isinstance(future, Future)
            self._pending = step, future
        else:
            save(state, checkpoint_id=path, process_group=self._group)
            self._complete(step)

    def wait(self) -> None:
        """Wait for the step that is being written, and complete it. A collective."""
        if self._pending is not None:
            step, future = self._pending
            self._pending = None
            future.result()
            self._complete(step)

    def poll(self) -> None:
        """Complete the step that is being written if this rank's part is done. No collective."""
        if self._pending is not None and dist.get_rank() == 0 and self._pending[1].done():
            step, future = self._pending
            self._pending = None
            future.result()
            self._complete(step)

    def _complete(self, step: int) -> None:
        # The first rank writes .metadata when every rank has said that its files are there.
        if dist.get_rank() == 0:
            step_folders.complete(self.out, step, self.facts)
            step_folders.prune(self.out, self.keep)
