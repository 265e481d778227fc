"""The generated pages are current, and a stale one is noticed."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from k3convert.cli.app import run
from k3convert.errors import ExitCode


def test_the_generated_pages_are_current(generate_docs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code = generate_docs.main(["--check"])

    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "old\n"])
def test_a_missing_or_stale_page_fails_the_check_and_is_left_as_it_is(
    generate_docs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    page = tmp_path / "page.md"
    if content is not None:
        page.write_text(content)
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    monkeypatch.setattr(generate_docs, "PAGES", {"page.md": lambda: "new\n"})

    code = generate_docs.main(["--check"])

    assert code == 1
    assert (page.read_text() if page.exists() else None) == content


def test_without_check_a_stale_page_is_written(
    generate_docs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    monkeypatch.setattr(generate_docs, "PAGES", {"deep/page.md": lambda: "new\n"})

    code = generate_docs.main([])

    assert code == 0
    assert (tmp_path / "deep" / "page.md").read_text() == "new\n"


def test_the_reference_names_what_the_help_names(generate_docs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for command in generate_docs.commands():
        run([command.name, "--help"])
        help_text = capsys.readouterr().out

        in_help = set(re.findall(r"--[a-z][a-z-]+", help_text)) - {"--help"}
        in_page = {name for p in command.parameters for name in re.findall(r"--[a-z][a-z-]+", p.typed)}
        assert in_page == in_help, command.name


def test_every_exit_code_is_explained(generate_docs: ModuleType) -> None:
    assert set(generate_docs.EXIT_MEANINGS) == set(ExitCode)
