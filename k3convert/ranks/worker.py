"""One rank of a pool: waits for jobs, answers each, and leaves without torch's own ending.

Run by the pool: ``python -m k3convert.ranks.worker FOLDER RANK WORLD_SIZE DEVICE_TYPE``.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Client
from pathlib import Path
from types import ModuleType
from typing import Any

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
# Of one collective. The pool's own limit is what a user sets; this one only ends ranks that nobody waits for any more.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def main() -> None:
    """Answer jobs until the pool closes the connection."""
    folder, rank, world_size, device_type = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    stack_file = (folder / f"rank{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
    faulthandler.enable()
    join(device_type, rank, world_size, folder / "rendezvous")
    connection = Client(str(folder / "answers"), authkey=bytes.fromhex(os.environ.pop("K3_RANKS_KEY")))
    connection.send_bytes(str(rank).encode())
    while True:
        try:
            entry, arguments = pickle.loads(connection.recv_bytes())  # noqa: S301 - of our own parent
        except EOFError:
            break
        try:
            answer: tuple[str, Any, BaseException | None] = ("done", find_entry(entry)(**arguments), None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the pool must hear of it
            answer = ("failed", traceback.format_exc(), _if_known(error))
        connection.send_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo aborts correct processes at exit now and then; nothing is left to do here.
    os._exit(0)


def join(device_type: str, rank: int, world_size: int, rendezvous: Path) -> None:
    """Enter the process group, on this rank's own device of the host."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device_type != "cpu":
        torch.get_device_module(device_type).set_device(rank)
    dist.init_process_group(
        BACKENDS[device_type],
        init_method=rendezvous.absolute().as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def find_entry(entry: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` or ``path/of/file.py:function`` names."""
    place, _, name = entry.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else import_module(place)
    found: Callable[..., Any] = getattr(module, name)
    return found


@cache
def _load_file(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _if_known(error: BaseException) -> BaseException | None:
    """The error itself where it is one of the tool's own, so that the pool can raise it again."""
    from k3convert.errors import K3Error

    if not isinstance(error, K3Error):
        return None
    try:
        pickle.dumps(error)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return error


if __name__ == "__main__":
    main()
