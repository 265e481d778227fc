"""Run the shell commands of documentation pages: one page is one session in one folder.

``sh`` blocks are run as they stand and must exit 0. ``console`` blocks hold commands after ``$ `` (``> `` continues
one) and their output, which is compared after figures that differ from run to run are masked; a line ``...`` stands
for any lines. A block marked ``sh no-run: REASON`` is not run.

``python tools/run_docs.py PAGE...`` runs pages; with ``--write`` it puts the present output into console blocks whose
output is stale.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMMAND_TIMEOUT_S = 120
NO_RUN = re.compile(r"sh no-run: \S.*")
SHELL_LIKE = ("bash", "shell", "zsh", "terminal")
ANY_LINES = "..."
# What differs from run to run or from machine to machine. Alternatives are tried in order.
VOLATILE = re.compile(
    r"\b[0-9a-f]{16,64}\b"  # digests
    r"|\d+(\.\d+)? [KMGT]?i?B(?=/s| of memory)"
    r"|(?<=free   )\d+(\.\d+)? [KMGT]?i?B"
    r"|\d+(\.\d+)?(?= s\b)"
    r"|\d+ workers?\b"
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its info string, its text, and the page's line on which the text begins (from 1)."""

    info: str
    text: str
    line: int

    @property
    def language(self) -> str:
        """The first word of the info string."""
        return self.info.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a page, and the output that a console block shows for it; None where none is shown."""

    command: str
    shown: str | None
    line: int


def fenced_blocks(page: str) -> list[Block]:
    """Every fenced block of a Markdown page.

    Raises:
        ValueError: a block is not closed.
    """
    blocks: list[Block] = []
    info, start, held = "", 0, list[str]()
    for number, line in enumerate(page.splitlines(), start=1):
        if not line.startswith("```"):
            held.append(line)
        elif start:
            blocks.append(Block(info, "\n".join(held), start))
            start, held = 0, []
        else:
            info, start, held = line.removeprefix("```").strip(), number + 1, []
    if start:
        raise ValueError(f"the block of line {start - 1} is not closed")
    return blocks


def steps(block: Block) -> Iterator[Step]:
    """What is to be run of a block.

    Raises:
        ValueError: a shell block under another name, a marker that is not known, or a console block without commands.
    """
    if block.language in SHELL_LIKE:
        raise ValueError(f"line {block.line}: write sh or console, not {block.language}: only these are run")
    if block.info == "sh":
        yield Step(block.text, None, block.line)
    elif block.language == "sh" and not NO_RUN.fullmatch(block.info):
        raise ValueError(f"line {block.line}: {block.info!r} is neither sh nor sh no-run: REASON")
    elif block.language == "console":
        yield from _console_steps(block)


def _console_steps(block: Block) -> Iterator[Step]:
    command, shown, first = list[str](), list[str](), block.line
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if line.startswith("$ "):
            if command:
                yield Step("\n".join(command), "\n".join(shown), first)
            command, shown, first = [line[2:]], [], number
        elif line.startswith("> ") and command and not shown:
            command.append(line[2:])
        elif not command:
            raise ValueError(f"line {number}: a console block begins with a command after '$ '")
        else:
            shown.append(line)
    if not command:
        raise ValueError(f"line {block.line}: a console block without a command")
    yield Step("\n".join(command), "\n".join(shown), first)


def run_step(step: Step, folder: Path) -> tuple[int, str]:
    """Run one command; its exit code, and stdout and stderr together.

    The commands of this environment come first on the path, and nothing is fetched from a hub.
    """
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment = {**os.environ, "PATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    flags = "-eu" if step.shown is None else "-u"
    done = subprocess.run(
        ["sh", flags, "-c", step.command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    return done.returncode, done.stdout.rstrip("\n")


def is_same_output(shown: str, found: str) -> bool:
    """Whether a page shows what a command prints, but for volatile figures and lines behind ``...``."""
    pattern = "".join(
        "(.*\n)*" if line == ANY_LINES else re.escape(VOLATILE.sub("#", line)) + "\n" for line in shown.splitlines()
    )
    return re.fullmatch(pattern, "".join(VOLATILE.sub("#", line) + "\n" for line in found.splitlines())) is not None


def run_page(page: str, folder: Path) -> tuple[list[str], str]:
    """Run a page's commands in ``folder``, in order.

    Returns:
        What is wrong, one text a command; and the page with the present output in its console blocks.
    """
    faults: list[str] = []
    lines = page.splitlines()
    moved = 0
    for step in [step for block in fenced_blocks(page) for step in steps(block)]:
        code, output = run_step(step, folder)
        if step.shown is None:
            if code:
                faults.append(f"line {step.line}: exit {code} of\n{step.command}\n{output}")
                break
        elif not is_same_output(step.shown, output):
            faults.append(f"line {step.line}: $ {step.command}\nthe page shows\n{step.shown}\nit prints\n{output}")
            begin = step.line - 1 + moved + len(step.command.splitlines())
            end = begin + len(step.shown.splitlines())
            lines[begin:end] = output.splitlines()
            moved += len(output.splitlines()) - (end - begin)
    return faults, "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the pages that are named; the exit code."""
    write = "--write" in arguments
    status = 0
    for path in (Path(argument) for argument in arguments if argument != "--write"):
        page = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            faults, current = run_page(page, Path(folder))
        if faults:
            status = 1
            print(f"{path}:", *faults, sep="\n")
            if write:
                path.write_text(current, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
