"""Small data files, the tokenizer of the tiny checkpoint, and ranks that train on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from k3convert.ranks import RankPool
from k3convert.synthesis import make_checkpoint
from k3convert.training.recipe_reading import parse_recipe, recipe_yaml
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


JOBS = Path(__file__).resolve().parent / "jobs.py"

RECIPE = """
description: a few steps
compute: fp32
model: {activation_checkpointing: false}
ops: {cross_entropy_implementation: chunk_loss}
data: {kind: synthetic, num_tokens: 16}
batch: {sequence_length: 16, global_rows: 4, micro_rows: 2}
optimizer: {learning_rate: 3e-3}
training: {steps: 4, freeze: [vision]}
saving: {every: 2, asynchronous: false}
"""


def recipe_text(*settings: str) -> str:
    return recipe_yaml(parse_recipe(RECIPE, settings))


@pytest.fixture(scope="session")
def slight_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with four experts: two blocks, and every kind of layer."""
    folder = tmp_path_factory.mktemp("slight") / "k3"
    make_checkpoint(folder, preset="tiny", num_layers=4, num_experts=4)
    return folder


class Ranks:
    """Runs the functions of ``jobs.py`` on every rank; the first rank's answer."""

    def __init__(self, world_size: int, checkpoint: Path) -> None:
        self.pool, self.checkpoint = RankPool(world_size), checkpoint

    def __call__(self, job: str, *settings: str, **arguments: Any) -> Any:
        given = {"recipe_yaml": recipe_text(*settings), "checkpoint": str(self.checkpoint), **arguments}
        return self.pool.run(f"{JOBS}:{job}", given, timeout_s=280)[0]


@pytest.fixture(scope="session")
def rank(slight_source: Path) -> Iterator[Ranks]:
    ranks = Ranks(1, slight_source)
    yield ranks
    ranks.pool.close()


@pytest.fixture(scope="session")
def two_ranks(slight_source: Path) -> Iterator[Ranks]:
    ranks = Ranks(2, slight_source)
    yield ranks
    ranks.pool.close()
