"""The generated part of the README."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3kernels.readme import with_current_table

README = Path(__file__).resolve().parents[2] / "kernels" / "README.md"


def test_the_op_table_is_current() -> None:
    text = README.read_text(encoding="utf-8")

    assert with_current_table(text) == text, "run: python -m k3kernels.readme"


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        with_current_table("# no table here")
