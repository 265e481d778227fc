"""One rank of a test: waits for jobs of its pool, answers each, and leaves without torch's own ending.

Run as a script by the pool in conftest.py: ``worker.py ADDRESS RANK WORLD_SIZE RENDEZVOUS``.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from datetime import timedelta
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Client
from pathlib import Path
from types import ModuleType


@cache
def load_jobs(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    import torch
    import torch.distributed as dist

    address, rank, world_size, rendezvous = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    connection = Client(address)
    connection.send_bytes(pickle.dumps(rank))
    while True:
        try:
            path, name, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        try:
            answer = ("done", getattr(load_jobs(path), name)(**arguments))
        except BaseException:  # noqa: BLE001 - whatever it is, the pool must hear of it
            answer = ("failed", traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo aborts correct processes at exit now and then; nothing is left to do here.
    os._exit(0)


if __name__ == "__main__":
    main()
