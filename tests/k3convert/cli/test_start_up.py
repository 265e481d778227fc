"""``--help`` and ``--version`` are instant: nothing heavy is imported for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

Command = Callable[..., Any]

HEAVY = ("torch", "numpy", "numba", "safetensors", "transformers", "huggingface_hub", "blake3", "tiktoken")
LOADED = """
import sys
from k3convert.cli.app import run
code = run(sys.argv[1:])
print(code, sorted(name for name in sys.modules if "." not in name), file=sys.stderr)
"""
COMMANDS = ("make-tiny", "inspect", "hf-to-dcp", "dcp-to-hf", "verify", "diff")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True)

    code, _, modules = done.stderr.strip().partition(" ")
    assert code == "0"
    assert not [name for name in HEAVY if repr(name) in modules]


def test_help_names_every_command(command: Command) -> None:
    outcome = command("--help")

    assert outcome.code == 0
    assert all(name in outcome.out for name in COMMANDS)
    assert outcome.err == ""


def test_the_version_is_that_of_the_package(command: Command) -> None:
    from k3convert import __version__

    outcome = command("--version")

    assert (outcome.code, outcome.out) == (0, f"k3convert {__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options(command: Command, name: str) -> None:
    outcome = command(name, "--help")

    assert outcome.code == 0
    assert all(option in outcome.out for option in ("--json", "--quiet", "--verbose", "--debug"))


def test_the_module_runs_as_the_script_does(process: Command) -> None:
    outcome = process("--version")

    assert outcome.code == 0
    assert outcome.out.startswith("k3convert ")
