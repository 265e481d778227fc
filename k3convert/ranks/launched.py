"""Ranks that a launcher such as torchrun has started: rank 0 says what is run, the others follow."""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from k3convert.ranks.pool import RanksFailed
from k3convert.ranks.worker import find_entry

# Object collectives go over gloo whatever the device; tensors over the device's own library.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


class LaunchedRanks:
    """The process group of the launcher, with this process as rank 0 and a rank itself.

    Args:
        device_type: ``cpu``, ``cuda`` or ``npu``.
        timeout_s: of one collective; after it, the ranks end with the stack of each.
    """

    def __init__(self, device_type: str, *, timeout_s: float) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if device_type != "cpu":
            torch.get_device_module(device_type).set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(BACKENDS[device_type], timeout=timedelta(seconds=timeout_s))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._timeout_s = timeout_s

    def run(self, entry: str, arguments: Mapping[str, Any], *, timeout_s: float) -> list[Any]:
        """As ``RankPool.run``, from rank 0; every rank must be here or in ``serve``.

        Raises:
            RanksFailed: ranks raised.
        """
        answers = self._together((entry, dict(arguments)), timeout_s)
        failed = {rank: answer for rank, (verdict, answer) in enumerate(answers) if verdict == "failed"}
        if failed:
            raise RanksFailed(
                f"{len(failed)} of {self.world_size} ranks failed",
                offenders=[f"rank {rank}: {text.strip().splitlines()[-1]}" for rank, text in failed.items()],
                cause=next(iter(failed.values())).strip(),
            )
        return [answer for _, answer in answers]

    def serve(self) -> None:
        """Follow rank 0 until it closes."""
        while self._together(None, self._timeout_s):
            pass

    def close(self) -> None:
        """Let the other ranks go; rank 0 alone calls it."""
        self._together(("", {}), self._timeout_s)

    def _together(self, job: tuple[str, dict[str, Any]] | None, timeout_s: float) -> list[tuple[str, Any]]:
        """Hear the job from rank 0, do it, and tell everyone; nothing where rank 0 closed."""
        import torch.distributed as dist

        said: list[Any] = [job]
        dist.broadcast_object_list(said, src=0)
        entry, arguments = said[0]
        if not entry:
            return []
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        try:
            answer = ("done", find_entry(entry)(**arguments))
        except Exception:  # noqa: BLE001 - whatever it is, rank 0 must hear of it
            answer = ("failed", traceback.format_exc())
        answers: list[Any] = [None] * self.world_size
        dist.all_gather_object(answers, answer)
        faulthandler.cancel_dump_traceback_later()
        return answers


def launched_world_size() -> int | None:
    """How many ranks a launcher has started; None without one."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
