"""One generated tiny checkpoint for every test that only reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3convert.synthesis import make_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, seed 0."""
    folder = tmp_path_factory.mktemp("synthesis") / "tiny"
    make_checkpoint(folder, preset="tiny")
    return folder
