"""No import is tried that can never succeed."""

from __future__ import annotations

import ast
import tomllib
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("k3convert", "model/k3model", "kernels/k3kernels")
# Distributions whose import name is another.
IMPORT_NAMES = {"flash-linear-attention": "fla", "fla-core": "fla", "pillow": "PIL"}


def guarded_imports() -> list[tuple[Path, str]]:
    """Every module that is imported inside a ``try`` that expects the import to fail."""
    found = []
    for source in SOURCES:
        for path in sorted((REPOSITORY / source).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Try) and any(_catches_import_error(handler) for handler in node.handlers):
                    found += [(path, name) for statement in node.body for name in _imported(statement)]
    return found


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else {"all"}
    return bool(names & {"ImportError", "ModuleNotFoundError", "all"})


def _imported(statement: ast.stmt) -> list[str]:
    names = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names


def declared_modules() -> set[str]:
    """Import names of every declared dependency, optional ones too."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *(line for group in project["optional-dependencies"].values() for line in group)]
    distributions = {line.split(">")[0].split("=")[0].split("[")[0].strip() for line in lines}
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in distributions}


def test_row_85_every_fallback_import_can_succeed() -> None:
    declared = declared_modules()

    dead = [
        f"{path.name}: {name}"
        for path, name in guarded_imports()
        if name.split(".")[0] not in declared and find_spec(name.split(".")[0]) is None
    ]

    assert dead == []
