"""Fixtures shared by the three test trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def reference_fixtures() -> Path:
    """The folder of reference answers made by other implementations; the suite passes without it."""
    folder = Path(os.environ.get("K3_FIXTURES", REPOSITORY.parent / "shared" / "fixtures"))
    if not folder.is_dir():
        pytest.skip(f"no reference fixtures: {folder} is not a folder (set K3_FIXTURES)")
    return folder
