"""The page that says where each field report is tested is complete and right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
PAGE = TESTS.parent / "docs" / "decisions" / "field-bugs.md"
NUM_ENTRIES = {"A": 23, "B": 17, "C": 16, "D": 10}
ENTRIES = [f"{letter}{number}" for letter, count in NUM_ENTRIES.items() for number in range(1, count + 1)]
ROWS = {
    row[1]: row[2]
    for row in re.finditer(r"^\| ([A-D]\d+) \| .*? \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
}
PLACE = re.compile(r"(?:`(?P<test>test_\w+)` in )?`(?P<file>[\w/]+\.py)`")


def test_every_entry_has_one_row() -> None:
    assert list(ROWS) == ENTRIES
    assert str(len(ENTRIES)) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_named_test_exists(entry: str) -> None:
    places = list(PLACE.finditer(ROWS[entry]))

    assert places
    for place in places:
        text = (TESTS.parent / place["file"]).read_text(encoding="utf-8")
        wanted = rf"def {place['test']}\(" if place["test"] else rf"def test_{entry.lower()}_"
        assert re.search(wanted, text), f"{place['file']} has no {wanted}"


OTHERS = re.findall(r"^\| ([EF])(\d+) \| .*? \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("letter", "number", "where"), OTHERS)
def test_files_of_layout_entries_have_tests_with_their_number(letter: str, number: str, where: str) -> None:
    for place in PLACE.finditer(where):
        text = (TESTS.parent / place["file"]).read_text(encoding="utf-8")
        wanted = rf"def test_(\w*_)?{letter.lower()}{int(number):02d}_"
        assert re.search(wanted, text), f"{place['file']} has no {wanted}"
