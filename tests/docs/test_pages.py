"""Every page's commands run, its links resolve, and the paths that it names exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXECUTED = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*EXECUTED, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "kernels" / "README.md"]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SOURCE_PATH = re.compile(r"(k3convert|model|kernels|tests|tools|examples|docs)/[\w./-]*\.(py|md|sh)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = (title.replace("`", "").strip().lower() for title in HEADING.findall(without_blocks(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> Iterator[str]:
    page = path.read_text(encoding="utf-8")
    for target in LINK.findall(without_blocks(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        if not found.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(found.read_text(encoding="utf-8")):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("path", EXECUTED, ids=name_of)
def test_the_commands_of_a_page_do_what_it_shows(path: Path, run_docs: ModuleType, tmp_path: Path) -> None:
    faults, _ = run_docs.run_page(path.read_text(encoding="utf-8"), tmp_path)

    assert not faults, "\n\n".join(faults)


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    assert not list(broken_links(path))


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_source_files_that_a_page_names_exist(path: Path) -> None:
    page = without_blocks(path.read_text(encoding="utf-8"))

    named = [span for span in CODE_SPAN.findall(page) if SOURCE_PATH.fullmatch(span)]

    assert not [span for span in named if not (ROOT / span).exists()]


def test_every_page_of_the_documentation_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        targets = (target.partition("#")[0] for target in LINK.findall(path.read_text(encoding="utf-8")))
        waiting += [(path.parent / target).resolve() for target in targets if target.endswith(".md")]

    assert not [name_of(path) for path in EXECUTED if path not in reached]


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Title\n[x](b.md) [y](#other) [z](#title) [w](https://example.org)\n")

    assert list(broken_links(tmp_path / "a.md")) == ["b.md: no such file", "#other: no such heading"]
