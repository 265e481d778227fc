"""The pages, and the two tools that run and generate them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tool(name: str) -> ModuleType:
    """A script of ``tools/`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run_docs() -> ModuleType:
    return load_tool("run_docs")


@pytest.fixture
def generate_docs() -> ModuleType:
    return load_tool("generate_docs")


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT
