"""Entries of a ``.distcp`` file: what we frame torch reads, what torch writes we find."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch

from k3convert.checkpoint.dcp_blob import MAX_PAYLOAD_BYTES, blob_frame, locate_payload
from k3convert.checkpoint.dtypes import CODES, TORCH_NAMES, num_bytes

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (4, 0), (0, 8), (300,), (70_000,), (1, 1, 1, 1)]


def payload_of(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Small positive values: legal patterns of every dtype, bool included."""
    return bytes(index % 2 for index in range(num_bytes(dtype, shape)))


def saved(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def locate(data: bytes, dtype: str, shape: tuple[int, ...]) -> int:
    return locate_payload(lambda offset, count: data[offset : offset + count], len(data), dtype, shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TORCH_NAMES)
def test_torch_reads_what_is_framed(dtype: str, shape: tuple[int, ...]) -> None:
    frame, payload = blob_frame(dtype, shape), payload_of(dtype, shape)

    loaded = torch.load(io.BytesIO(frame.prefix + payload + frame.suffix), weights_only=True)

    assert tuple(loaded.shape) == shape
    assert loaded.dtype == getattr(torch, TORCH_NAMES[dtype])
    assert loaded.is_contiguous()
    assert bytes_of(loaded) == payload


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TORCH_NAMES)
def test_the_payload_of_torchs_own_entry_is_found(dtype: str, shape: tuple[int, ...]) -> None:
    payload = payload_of(dtype, shape)
    flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    data = saved(flat.view(getattr(torch, TORCH_NAMES[dtype])).reshape(shape))

    start = locate(data, dtype, shape)

    assert data[start : start + len(payload)] == payload


def test_the_payload_of_our_entry_is_found_without_reading_an_archive() -> None:
    frame = blob_frame("BF16", (4, 6))
    data = frame.prefix + bytes(range(48)) + frame.suffix
    reads: list[tuple[int, int]] = []

    def read_at(offset: int, count: int) -> bytes:
        reads.append((offset, count))
        return data[offset : offset + count]

    assert locate_payload(read_at, len(data), "BF16", (4, 6)) == len(frame.prefix)
    assert reads == [(0, len(frame.prefix))]


def test_the_data_of_an_entry_are_aligned() -> None:
    assert all(len(blob_frame(dtype, (5,)).prefix) % 64 == 0 for dtype in TORCH_NAMES)


def test_a_view_into_a_larger_storage_is_found() -> None:
    whole = torch.arange(100, dtype=torch.int32)

    data = saved(whole[10:34].view(4, 6))

    start = locate(data, "I32", (4, 6))
    assert data[start : start + 96] == bytes_of(whole[10:34])


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (torch.zeros(6, 4, dtype=torch.int32).t(), "not contiguous"),
        (torch.zeros(1, 6, dtype=torch.int32).expand(4, 6), "not contiguous"),
        (torch.zeros(4, 6, dtype=torch.int64), "holds I64"),
        (torch.zeros(6, 4, dtype=torch.int32), r"holds I32 \[6, 4\]"),
        (torch.zeros(24, dtype=torch.int32), r"holds I32 \[24\]"),
        ({"a": torch.zeros(4, 6, dtype=torch.int32)}, "holds a dict"),
        (7, "holds a int"),
    ],
)
def test_an_entry_that_holds_something_else_is_refused(stored: Any, words: str) -> None:
    buffer = io.BytesIO()
    torch.save(stored, buffer)

    with pytest.raises(ValueError, match=words):
        locate(buffer.getvalue(), "I32", (4, 6))


def test_a_compressed_entry_is_refused() -> None:
    good = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(4, 6, dtype=torch.int32))))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in good.namelist():
            compressed = zipfile.ZIP_DEFLATED if name.endswith("data/0") else zipfile.ZIP_STORED
            archive.writestr(name, good.read(name), compress_type=compressed)

    with pytest.raises(ValueError, match="compressed"):
        locate(out.getvalue(), "I32", (4, 6))


@pytest.mark.parametrize("keep", [0, 10, 200, -1, -50])
def test_a_cut_entry_is_refused(keep: int) -> None:
    data = saved(torch.arange(24, dtype=torch.int32).view(4, 6))

    with pytest.raises(ValueError, match=r"no entry|damaged|cut short"):
        locate(data[:keep], "I32", (4, 6))


def test_an_entry_that_does_not_fit_the_format_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        blob_frame("U8", (MAX_PAYLOAD_BYTES + 1,))


def test_codes_and_names_are_one_to_one() -> None:
    assert {CODES[name]: name for name in CODES} == TORCH_NAMES
    assert all(hasattr(torch, name) for name in CODES)
