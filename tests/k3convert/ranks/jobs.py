"""What the ranks of these tests do."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from k3convert.errors import BadConfig


def sum_of_ranks(start: int) -> float:
    total = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


def fail_on_rank_one() -> int:
    if dist.get_rank() == 1:
        raise ValueError("rank one fails")
    return dist.get_rank()


def wait_for_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def die_on_rank_one() -> int:
    if dist.get_rank() == 1:
        print("the last words of rank one", file=sys.stderr, flush=True)
        os._exit(9)
    return dist.get_rank()


def refuse_everywhere() -> None:
    raise BadConfig("no such layer", offenders=["layer 7"], hint="look again")


def processes() -> int:
    return os.getpid()
