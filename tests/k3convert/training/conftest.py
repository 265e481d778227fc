"""Small data files and the tokenizer of the tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from k3model.tokenizer import KimiTokenizer


@pytest.fixture(scope="session")
def tokenizer(small_source: Path) -> KimiTokenizer:
    return KimiTokenizer.from_folder(small_source)


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three images of different sizes: 28x28 is one token, 56x28 two, 30x60 six (2 x 3 after padding)."""
    folder = tmp_path / "images"
    folder.mkdir()
    for name, size in (("a.png", (28, 28)), ("b.png", (56, 28)), ("c.png", (30, 60))):
        Image.new("RGB", size, (200, 40, 90)).save(folder / name)
    return folder
