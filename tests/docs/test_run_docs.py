"""The runner of documentation pages fails on what a reader would stumble over."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

PAGE = """# Page

```sh
echo one > file
```

```console
$ cat file
one
$ printf 'two\\nthree\\n'
two
three
```
"""


def test_blocks_of_a_page_share_one_folder(run_docs: ModuleType, tmp_path: Path) -> None:
    faults, current = run_docs.run_page(PAGE, tmp_path)

    assert not faults
    assert current == PAGE


def test_a_failing_sh_block_is_a_fault_with_its_output(run_docs: ModuleType, tmp_path: Path) -> None:
    faults, _ = run_docs.run_page("```sh\necho reason\nfalse\necho never\n```\n", tmp_path)

    assert len(faults) == 1
    assert "exit 1" in faults[0]
    assert "reason" in faults[0].splitlines()


def test_output_that_a_page_shows_wrongly_is_a_fault_and_can_be_rewritten(run_docs: ModuleType, tmp_path: Path) -> None:
    stale = PAGE.replace("two\nthree\n```", "two\n```")

    faults, current = run_docs.run_page(stale, tmp_path)

    assert len(faults) == 1
    assert current == PAGE


def test_a_marked_block_is_not_run(run_docs: ModuleType, tmp_path: Path) -> None:
    faults, _ = run_docs.run_page("```sh no-run: needs a cluster\ntouch ran\n```\n", tmp_path)

    assert not faults
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("info", ["sh no-run", "sh no-run:", "sh skip", "bash", "shell"])
def test_a_shell_block_that_nothing_would_run_is_refused(run_docs: ModuleType, info: str) -> None:
    (block,) = run_docs.fenced_blocks(f"```{info}\ntrue\n```\n")

    with pytest.raises(ValueError, match="line 2"):
        list(run_docs.steps(block))


def test_a_console_block_without_a_command_is_refused(run_docs: ModuleType) -> None:
    (block,) = run_docs.fenced_blocks("```console\noutput\n```\n")

    with pytest.raises(ValueError, match="begins with a command"):
        list(run_docs.steps(block))


def test_a_block_that_is_not_closed_is_refused(run_docs: ModuleType) -> None:
    with pytest.raises(ValueError, match="line 3"):
        run_docs.fenced_blocks("# Page\n\n```sh\ntrue\n")


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ("in 0.18 s (39.22 MiB/s, 2 workers)", "in 12 s (1.50 GiB/s, 8 workers)"),
        ("1 worker, at most", "16 workers, at most"),
        ("41.48 MiB of memory at most", "162 MiB of memory at most"),
        ("digest " + "a" * 64, "digest " + "0" * 64),
        ("...\nlast", "note: first\nsecond\nlast"),
        ("...\nlast", "last"),
    ],
)
def test_figures_that_differ_from_run_to_run_are_masked(run_docs: ModuleType, shown: str, found: str) -> None:
    assert run_docs.is_same_output(shown, found)


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ("1,510 tensors", "1,511 tensors"),
        ("7.19 MiB in 14 files", "7.20 MiB in 14 files"),
        ("identical", ""),
        ("a", "a\nb"),
    ],
)
def test_everything_else_must_be_what_the_page_shows(run_docs: ModuleType, shown: str, found: str) -> None:
    assert not run_docs.is_same_output(shown, found)
