"""Field reports A1 to A8, A12, A13 and A16: what a safetensors file may and may not look like."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from k3convert.checkpoint.safetensors_header import ShardHeader, build_header, read_header
from k3convert.errors import BadShard, IncompleteCheckpoint

Entry = dict[str, object]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a safetensors file from header text and a number of data bytes."""

    def write_file(header: str | dict[str, object], num_data: int = 0, *, length: int | None = None) -> Path:
        text = (header if isinstance(header, str) else json.dumps(header)).encode()
        path = tmp_path / "model.safetensors"
        prefix = (len(text) if length is None else length).to_bytes(8, "little")
        path.write_bytes(prefix + text + bytes(num_data))
        return path

    return write_file


def entry(dtype: str, shape: list[object], begin: object, end: object) -> Entry:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(path: Path) -> str:
    with pytest.raises(BadShard) as caught:
        read_header(path)
    return "\n".join([str(caught.value), *caught.value.offenders])


def test_a1_a_duplicate_key_is_called_by_its_name(write: Write) -> None:
    one = '{"dtype":"U8","shape":[8],"data_offsets":[0,8]}'
    other = '{"dtype":"U8","shape":[8],"data_offsets":[8,16]}'

    message = refused(write(f'{{"a":{one},"a":{other}}}', 16))

    assert "duplicate key 'a'" in message


def test_a2_shape_and_stored_bytes_must_agree(write: Write) -> None:
    message = refused(write({"big": entry("F32", [1000, 1000], 0, 4)}, 4))

    assert "big" in message
    assert "4000000 bytes" in message


@pytest.mark.parametrize(
    ("header", "num_data", "word"),
    [
        ({"k": entry("U8", [8], 0, 8), "v": entry("U8", [8], 0, 8)}, 8, "overlaps"),
        ({"k": entry("U8", [8], 0, 8), "v": entry("U8", [8], 4, 12)}, 12, "overlaps"),
        ({"k": entry("U8", [8], 0, 8), "v": entry("U8", [8], 12, 20)}, 20, "hole"),
        ({"k": entry("U8", [8], 0, 8)}, 12, "belong to none"),
    ],
    ids=["alias", "overlap", "hole", "trailing"],
)
def test_a3_the_data_must_be_covered_exactly_once(
    write: Write, header: dict[str, object], num_data: int, word: str
) -> None:
    assert word in refused(write(header, num_data))


@pytest.mark.parametrize("dtype", ["F99", "f32"])
def test_a4_an_unknown_dtype_is_refused_by_name(write: Write, dtype: str) -> None:
    message = refused(write({"w": entry(dtype, [1], 10**9, 10**9 + 4)}, 4))

    assert "w: unknown dtype" in message
    assert dtype in message


@pytest.mark.parametrize("length", [10**6, 100_000_001, 2**64 - 1])
def test_a5_the_length_is_checked_before_anything_is_allocated(write: Write, length: int) -> None:
    message = refused(write("{}" + " " * 190, 0, length=length))

    assert str(length) in message


def test_a6_empty_tensors_are_legal(write: Write) -> None:
    header = read_header(
        write({"a": entry("U8", [4], 0, 4), "none": entry("F32", [0], 4, 4), "z": entry("U8", [0, 8], 4, 4)}, 4)
    )

    assert {found.name: found.nbytes for found in header.entries} == {"a": 4, "none": 0, "z": 0}


def test_a6_a_full_tensor_in_an_empty_range_is_refused(write: Write) -> None:
    assert "needs 4 bytes" in refused(write({"w": entry("F32", [1], 0, 0)}))


def test_a7_a_shard_cut_short_is_refused_with_both_sizes(write: Write) -> None:
    path = write({"a": entry("U8", [64], 0, 64), "b": entry("U8", [64], 64, 128)}, 128)
    os.truncate(path, path.stat().st_size - 64)

    message = refused(path)

    assert "truncated" in message
    assert "1 tensors cut" in message


@pytest.mark.parametrize("size", [99_993, 99_994, 100_000, 100_001])
def test_a8_headers_around_a_round_size_are_read_whole(write: Write, size: int) -> None:
    text = json.dumps({"a": entry("U8", [4], 0, 4)})

    header = read_header(write(text.ljust(size), 4))

    assert len(header.raw) == size + 8
    assert [found.name for found in header.entries] == ["a"]


@pytest.mark.parametrize("metadata", ["absent", None, {}], ids=["absent", "null", "empty"])
def test_a12_files_without_format_metadata_are_read(write: Write, metadata: object) -> None:
    header: dict[str, object] = {"a": entry("U8", [1], 0, 1)}
    if metadata != "absent":
        header["__metadata__"] = metadata

    assert isinstance(read_header(write(header, 1)), ShardHeader)


def test_a12_another_frameworks_format_is_refused(write: Write) -> None:
    assert "'tf'" in refused(write({"__metadata__": {"format": "tf"}, "a": entry("U8", [1], 0, 1)}, 1))


def test_a12_files_are_written_with_the_format_of_torch() -> None:
    raw, _ = build_header([("a", "U8", (1,))])

    assert json.loads(raw[8:])["__metadata__"] == {"format": "pt"}


def test_a13_a_file_of_metadata_alone_is_read(write: Write) -> None:
    assert read_header(write({"__metadata__": {"format": "pt"}})).entries == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 16570000000\n", "Git LFS"),
        (b"<!DOCTYPE html><html><head><title>404</title></head></html>" + b" " * 200, "HTML"),
        (b"", "empty"),
        (b"\x05\x00", "too short"),
    ],
    ids=["lfs", "html", "empty", "short"],
)
def test_a16_an_interrupted_download_is_called_what_it_is(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)

    assert words in refused(path)


def test_a16_a_dangling_link_is_an_interrupted_download(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.symlink_to(tmp_path / "blobs" / "gone")

    with pytest.raises(IncompleteCheckpoint, match="interrupted download"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"w": entry("U8", [-1], 0, 1)}, "non-negative"),
        ({"w": entry("U8", [1.5], 0, 1)}, "non-negative"),
        ({"w": entry("U8", [True], 0, 1)}, "non-negative"),
        ({"w": entry("U8", [2**63], 0, 1)}, "non-negative"),
        ({"w": entry("U8", [2**62, 2**62], 0, 1)}, "needs"),
        ({"w": entry("U8", [1], 1, 0)}, "reversed"),
        ({"w": entry("U8", [1], "0", 1)}, "pair of integers"),
        ({"w": entry("F4", [3], 0, 2)}, "whole bytes"),
        ({"w": ["U8"]}, "not an object"),
        ({"__metadata__": {"format": 1}}, "object of strings"),
        ("[]", "begin with"),
        (' {"a":1}', "begin with"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_headers_that_no_writer_makes_are_refused(write: Write, header: object, word: str) -> None:
    assert word in refused(write(header, 1))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((4).to_bytes(8, "little") + b'{"\xff"')

    assert "UTF-8" in refused(path)


def test_every_offender_is_listed(write: Write) -> None:
    header = {f"w{number}": entry("F99", [1], 0, 4) for number in range(20)}

    with pytest.raises(BadShard) as caught:
        read_header(write(header, 4))

    assert len(caught.value.offenders) == 20
