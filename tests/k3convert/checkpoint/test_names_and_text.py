"""File names and JSON from anybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k3convert.checkpoint.json_text import DuplicateKey, dump_json, parse_json
from k3convert.checkpoint.member_paths import resolve_member, unsafe_reason
from k3convert.checkpoint.regular_files import open_regular, read_regular, why_unreadable
from k3convert.errors import PathEscape


@pytest.mark.parametrize("name", ["a", "a.safetensors", "a/b", "a..b", "...", "ünlike", "a b", "-a", "a~"])
def test_a_plain_name_is_safe(name: str) -> None:
    assert unsafe_reason(name) is None


@pytest.mark.parametrize(
    "name",
    ["", "/a", "a/../b", "..", ".", "./a", "a/.", "a//b", "~", "~root", "a\\b", "a:b", "a\0", "a\n", "a\x1f", "\udcff",
     1, None, b"a", ["a"]],
)  # fmt: skip
def test_any_other_name_has_a_reason(name: object) -> None:
    assert unsafe_reason(name)


def test_a_member_is_resolved_without_following_it_away(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (tmp_path / "outside").touch()
    (folder / "inside").touch()
    (folder / "good").symlink_to("inside")
    (folder / "evil").symlink_to("../outside")
    (folder / "below" / "evil").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")

    assert resolve_member(folder, "good") == folder / "good"
    assert resolve_member(folder, "not there") == folder / "not there"
    assert resolve_member(folder, "loop") == folder / "loop"
    for name in ("evil", "below/evil", "below/evil/outside", "../outside"):
        with pytest.raises(PathEscape):
            resolve_member(folder, name)


def test_a_sibling_that_begins_with_the_folders_name_is_outside(tmp_path: Path) -> None:
    (tmp_path / "k3").mkdir()
    (tmp_path / "k3-evil").mkdir()
    (tmp_path / "k3" / "link").symlink_to("../k3-evil")

    with pytest.raises(PathEscape):
        resolve_member(tmp_path / "k3", "link")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "dangling").symlink_to("gone")

    assert read_regular(tmp_path / "file") == b"x"
    for name, words in (
        ("pipe", "not a regular file"),
        (".", "a folder"),
        ("gone", "is missing"),
        ("dangling", "interrupted download"),
    ):
        with pytest.raises(OSError) as caught:
            open_regular(tmp_path / name)
        assert words in why_unreadable(tmp_path / name, caught.value)


@pytest.mark.parametrize("text", [b'{"a":1,"a":1}', b'{"b":{"a":1,"a":2}}', b'[{"":1,"":1}]'])
def test_a_key_twice_is_refused_at_any_depth(text: bytes) -> None:
    with pytest.raises(DuplicateKey, match="duplicate key"):
        parse_json(text)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"{'a':1}", b"1 2"]
)
def test_what_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_the_canonical_form_does_not_depend_on_the_order() -> None:
    assert dump_json({"b": 1, "a": "ü"}) == dump_json({"a": "ü", "b": 1}) == '{"a":"ü","b":1}'.encode()
