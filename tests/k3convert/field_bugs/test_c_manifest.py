"""Field reports C1 and C4: a manifest that a hostile or a careless writer left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3convert.errors import BadMetadata, DigestMismatch, PathEscape
from k3convert.planning.manifest import seal

Refused = Callable[..., str]

MANIFEST = "k3convert/manifest.json"


@pytest.fixture
def edit_manifest(dcp: Path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """Change a manifest and give it a right root digest again, as a hostile writer would."""

    def edit(change: Callable[[dict[str, Any]], None]) -> Path:
        document = json.loads((dcp / MANIFEST).read_text())
        change(document)
        del document["root_digest"]
        (dcp / MANIFEST).write_bytes(seal(document))
        return dcp

    return edit


@pytest.mark.parametrize("kind", ["files", "headers"])
@pytest.mark.parametrize("name", ["../../../../evil.txt", "/tmp/evil.txt", "a\0b", "x/./y"])
def test_c1_a_manifest_cannot_name_a_file_outside_the_destination(
    edit_manifest: Callable[[Callable[[dict[str, Any]], None]], Path],
    tmp_path: Path,
    refused_by_dcp_to_hf: Refused,
    kind: str,
    name: str,
) -> None:
    def change(document: dict[str, Any]) -> None:
        record = [file for file in document["files"] if file["name"].startswith(f"k3convert/assets/{kind}/")][-1]
        record["name"] = f"k3convert/assets/{kind}/{name}"

    folder = edit_manifest(change)

    message = refused_by_dcp_to_hf(folder, PathEscape)

    assert MANIFEST in message
    assert not list(tmp_path.rglob("evil.txt*"))


@pytest.mark.parametrize(
    "record",
    [
        5,
        None,
        [],
        {},
        {"name": 5},
        {"name": "x"},
        {"name": "x", "nbytes": "1", "digest": "a"},
        {"name": "x", "nbytes": 1},
    ],
)
def test_c4_a_manifest_with_a_record_that_is_none_is_refused(
    edit_manifest: Callable[[Callable[[dict[str, Any]], None]], Path], refused_by_dcp_to_hf: Refused, record: object
) -> None:
    folder = edit_manifest(lambda document: document["files"].append(record))

    assert MANIFEST in refused_by_dcp_to_hf(folder, BadMetadata)


def test_c1_a_kept_file_that_is_a_link_out_of_the_folder_is_refused(
    dcp: Path, tmp_path: Path, refused_by_dcp_to_hf: Refused
) -> None:
    kept = dcp / "k3convert/assets/files/tokenizer_config.json"
    secret = Path(shutil.move(kept, tmp_path / "secret"))
    kept.symlink_to(secret)

    assert "tokenizer_config.json" in refused_by_dcp_to_hf(dcp, PathEscape)


def test_c4_a_flipped_manifest_is_refused(dcp: Path, refused_by_dcp_to_hf: Refused) -> None:
    text = (dcp / MANIFEST).read_text()
    (dcp / MANIFEST).write_text(text.replace('"experts": "packed"', '"experts": "bf16"'))

    assert "root digest" in refused_by_dcp_to_hf(dcp, DigestMismatch)
