"""Small checkpoints, and the means to damage them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from k3convert.checkpoint.safetensors_header import build_header, read_header

INDEX = "model.safetensors.index.json"


@dataclass
class StoredTensor:
    """One tensor in memory: what a test changes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    shard: str


Tensors = dict[str, StoredTensor]


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint; read it, never write to it."""
    from k3convert.synthesis import make_checkpoint

    folder = tmp_path_factory.mktemp("tiny") / "k3"
    make_checkpoint(folder, preset="tiny", num_layers=None, num_experts=None, seed=0, sparse=False)
    return folder


@pytest.fixture(scope="session")
def small_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first five layers of a tiny checkpoint with four experts: enough for most faults, and quick to rewrite."""
    from k3convert.synthesis import make_checkpoint

    folder = tmp_path_factory.mktemp("small") / "k3"
    make_checkpoint(folder, preset="tiny", num_layers=5, num_experts=4, seed=1, sparse=False)
    return folder


@pytest.fixture
def tiny(tiny_source: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may change."""
    return Path(shutil.copytree(tiny_source, tmp_path / "tiny"))


@pytest.fixture
def small(small_source: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint that a test may change."""
    return Path(shutil.copytree(small_source, tmp_path / "small"))


@pytest.fixture
def edit_tensors() -> Callable[[Path, Callable[[Tensors], None]], None]:
    """Rewrite a checkpoint after a change to its tensors; shards and index follow."""
    return rewrite_tensors


def load_tensors(folder: Path) -> Tensors:
    """All tensors of a folder, in the order of the shards' bytes."""
    out: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        for entry in read_header(path).entries:
            out[entry.name] = StoredTensor(
                entry.dtype, entry.shape, data[entry.offset : entry.offset + entry.nbytes], path.name
            )
    return out


def rewrite_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Load all tensors, change them, write shards and index again."""
    tensors = load_tensors(folder)
    change(tensors)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    by_shard: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        by_shard.setdefault(tensor.shard, {})[name] = tensor
    for shard, members in by_shard.items():
        raw, _ = build_header((name, tensor.dtype, tensor.shape) for name, tensor in members.items())
        (folder / shard).write_bytes(raw + b"".join(tensor.data for tensor in members.values()))
    index = folder / INDEX
    if index.exists():
        document = json.loads(index.read_text())
        document["weight_map"] = {name: tensor.shard for name, tensor in tensors.items()}
        document["metadata"]["total_size"] = sum(len(tensor.data) for tensor in tensors.values())
        index.write_text(json.dumps(document))


@pytest.fixture
def edit_json() -> Callable[[Path, Callable[[dict[str, object]], None]], None]:
    """Change a JSON file in place."""

    def edit(path: Path, change: Callable[[dict[str, object]], None]) -> None:
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return edit


@pytest.fixture
def plain_experts() -> Callable[[str], Callable[[Tensors], None]]:
    """A change that decodes the packed experts to plain weights of a dtype."""

    def change_to(dtype: str) -> Callable[[Tensors], None]:
        def change(tensors: Tensors) -> None:
            out: Tensors = {}
            for name, tensor in tensors.items():
                if name.endswith(".weight_packed"):
                    module = name.removesuffix(".weight_packed")
                    out[module + ".weight"] = decoded(tensor, tensors[module + ".weight_scale"], dtype)
                elif not name.endswith(".weight_scale"):
                    out[name] = tensor
            tensors.clear()
            tensors.update(out)

        return change

    return change_to


def decoded(packed: StoredTensor, scale: StoredTensor, dtype: str) -> StoredTensor:
    """One expert matrix as plain values, through the reference decoder."""
    import torch

    from k3kernels.ops.mxfp4.dequantize.eager import dequantize

    rows, half = packed.shape
    codes = torch.frombuffer(bytearray(packed.data), dtype=torch.uint8).view(rows, half)
    scales = torch.frombuffer(bytearray(scale.data), dtype=torch.uint8).view(rows, half // 16)
    values = dequantize(codes, scales).to({"BF16": torch.bfloat16, "F32": torch.float32}[dtype])
    return StoredTensor(dtype, (rows, 2 * half), values.view(torch.uint8).numpy().tobytes(), packed.shard)
