"""Headers written here and by the safetensors library are the same to both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from k3convert.checkpoint.dtypes import num_bytes
from k3convert.checkpoint.safetensors_header import build_header, read_header

LINES = [
    ("weight", "BF16", (3, 5)),
    ("scalar", "F32", ()),
    ("empty", "F32", (0, 8)),
    ("names may be long and ünlike", "U8", (7,)),
    ("flags", "BOOL", (2,)),
    ("whole", "I64", (1, 1)),
]


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None, {"format": "pt", "note": "x"}])
def test_the_library_reads_what_is_written(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    raw, entries = build_header(LINES, metadata=metadata)
    data = b"".join(bytes(index % 2 for index in range(entry.nbytes)) for entry in entries)
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw + data)

    with safe_open(path, "pt") as file:
        assert file.metadata() == metadata
        assert set(file.keys()) == {name for name, _, _ in LINES}
        for name, _, shape in LINES:
            assert tuple(file.get_tensor(name).shape) == shape


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3, 4, dtype=torch.bfloat16), "a": torch.arange(5), "none": torch.empty(0, 3)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})

    header = read_header(path)

    data = path.read_bytes()
    assert {entry.name: entry.shape for entry in header.entries} == {"b": (3, 4), "a": (5,), "none": (0, 3)}
    for entry in header.entries:
        stored = tensors[entry.name]
        wanted = bytes(stored.reshape(-1).view(torch.uint8).numpy()) if stored.numel() else b""
        assert data[entry.offset : entry.offset + entry.nbytes] == wanted


def test_a_header_is_built_again_as_it_was_read(tmp_path: Path) -> None:
    raw, entries = build_header(LINES)
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw + bytes(sum(entry.nbytes for entry in entries)))

    header = read_header(path)

    assert header.raw == raw
    assert build_header([(entry.name, entry.dtype, entry.shape) for entry in header.entries])[0] == raw


def test_data_begin_at_a_multiple_of_eight() -> None:
    for length in range(1, 20):
        raw, _ = build_header([("x" * length, "U8", (1,))])
        assert len(raw) % 8 == 0


@pytest.mark.fixtures
def test_the_shards_of_another_writer_are_read(reference_fixtures: Path) -> None:
    shards = sorted((reference_fixtures / "safetensors_reader").glob("*.safetensors"))

    headers = [read_header(path) for path in shards]

    for header in headers:
        with safe_open(header.path, "pt") as file:
            assert {entry.name for entry in header.entries} == set(file.keys())
            for entry in header.entries:
                assert tuple(file.get_tensor(entry.name).shape) == entry.shape
                assert num_bytes(entry.dtype, entry.shape) == entry.nbytes
