"""The weights of a Hugging Face folder into a network: one file or an index, packed experts or plain ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from k3kernels import K3Op
from k3model.census import TEXT_ROOT
from k3model.released_names import copy_stored, released_views

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

Read = Callable[[str], Tensor]


def fill(network: nn.Module, folder: Path) -> None:
    """Read every tensor of the network from the folder's safetensors files.

    Names may begin with ``language_model.`` or without it. The conversion tool's ``load_model`` reads more forms and
    checks more; both leave no tensor unread and none unfilled.

    Raises:
        FileNotFoundError: the folder has no safetensors files.
        ValueError: tensors are missing or left over, or shapes do not fit.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        readers: dict[str, Read] = {}
        for path in _shards(folder):
            file = stack.enter_context(safe_open(path, framework="pt"))
            readers |= dict.fromkeys(map(_canonical, file.keys()), _reader(file.get_tensor, file.keys()))
        missing: list[str] = []
        for name, out in released_views(network):
            if not _fill_one(name, out, readers):
                missing.append(name)
    if missing or readers:
        raise ValueError(
            f"{folder}: {len(missing)} tensors are missing ({missing[:3]}), {len(readers)} have no place in the "
            f"network ({sorted(readers)[:3]})"
        )


def _fill_one(name: str, out: Tensor, readers: dict[str, Read]) -> bool:
    """Fill one tensor and take what was read out of ``readers``; whether it was there."""
    packed, scale = f"{name}_packed", f"{name}_scale"
    if packed in readers and scale in readers:
        dtype = torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float32
        decode = K3Op("mxfp4", "dequantize", "eager")
        stored = decode(readers.pop(packed)(packed), readers.pop(scale)(scale), dtype=dtype)
    elif name in readers:
        stored = readers.pop(name)(name)
    else:
        return False
    copy_stored(name, stored, out)
    return True


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    raise FileNotFoundError(f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}")


def _canonical(stored_name: str) -> str:
    return TEXT_ROOT + stored_name if stored_name.startswith(("model.", "lm_head.")) else stored_name


def _reader(get_tensor: Read, stored_names: list[str]) -> Read:
    by_name = {_canonical(name): name for name in stored_names}
    return lambda name: get_tensor(by_name[name])
