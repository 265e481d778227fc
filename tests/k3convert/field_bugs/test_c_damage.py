"""Field report C1: bytes changed at random in what a pickle or an archive reader sees."""

from __future__ import annotations

import contextlib
import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3convert.checkpoint import dcp_blob
from k3convert.checkpoint.dcp_metadata import read_metadata
from k3convert.errors import BadInput

NUM_METADATA, NUM_ENTRIES = 200, 1500


def survives(read: Callable[[], object]) -> None:
    """A reader may succeed or refuse; it may not fail in another way."""
    with contextlib.suppress(BadInput, ValueError):
        read()


def test_c1_no_damage_to_a_metadata_file_is_more_than_a_refusal(dcp: Path) -> None:
    good = (dcp / ".metadata").read_bytes()
    chance = random.Random(0)

    for _ in range(NUM_METADATA):
        damaged = bytearray(good)
        for _ in range(chance.choice((1, 1, 2, 8))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (dcp / ".metadata").write_bytes(bytes(damaged))
        survives(lambda: read_metadata(dcp))


def test_c1_no_damage_to_an_entry_of_torch_is_more_than_a_refusal() -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(24, dtype=torch.int32).view(4, 6), buffer)
    good = buffer.getvalue()
    chance = random.Random(0)

    for _ in range(NUM_ENTRIES):
        damaged = bytearray(good)
        for _ in range(chance.choice((1, 1, 2, 8))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        data = bytes(damaged)

        def read_at(offset: int, count: int, data: bytes = data) -> bytes:
            assert offset >= 0
            return data[offset : offset + count]

        def locate(data: bytes = data, read_at: Callable[[int, int], bytes] = read_at) -> None:
            found = dcp_blob.locate_payload(read_at, len(data), "I32", (4, 6))
            assert 0 <= found <= len(data) - 96

        survives(locate)


def test_c1_a_view_that_begins_before_its_storage_is_refused() -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(24, dtype=torch.int32), buffer)
    good = zipfile.ZipFile(io.BytesIO(buffer.getvalue()))
    names = good.namelist()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            content = good.read(name)
            if name.endswith("data.pkl"):
                assert content.count(b"K\x00K\x18\x85") == 1
                content = content.replace(b"K\x00K\x18\x85", b"J\xfc\xff\xff\xffK\x18\x85")
            archive.writestr(name, content)
    data = out.getvalue()

    with pytest.raises(ValueError, match="begins before"):
        dcp_blob.locate_payload(lambda offset, count: data[offset : offset + count], len(data), "I32", (24,))
