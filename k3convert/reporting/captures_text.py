"""The result of ``verify-parity --capture`` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3convert.reporting.to_text import INDENT, count_text


def captures_text(document: Mapping[str, Any]) -> str:
    """What was captured, and what was not run and why."""
    lines = [f"{document['folder']}: {count_text(len(document['captured']), 'capture')}"]
    lines += [f"{INDENT}{cell}" for cell in document["captured"]]
    lines += [f"{INDENT}not run: {cell}: {reason}" for cell, reason in document["not_run"].items()]
    return "\n".join(lines)
