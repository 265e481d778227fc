"""Command lines, in this process or in one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from k3convert.cli.app import run


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said where."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout as exactly one JSON document."""
        found: dict[str, Any] = json.loads(self.out)
        return found


Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command line in this process."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Outcome(int(code), said.out, said.err)

    return call


@pytest.fixture
def process() -> Command:
    """Run a command line in a process of its own."""

    def call(*arguments: object, **environment: str) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "k3convert", *map(str, arguments)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(scope="session")
def small_dcp(small_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint as a packed DCP; read it, never write to it."""
    folder = tmp_path_factory.mktemp("dcp") / "packed"
    assert run(["hf-to-dcp", str(small_source), str(folder), "--quiet"]) == 0
    return folder
