"""The result of ``selftest`` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3convert.reporting.to_text import INDENT, table_text


def selftest_text(document: Mapping[str, Any]) -> str:
    """One line a fault, and for those that were missed what was found instead."""
    faults = document["faults"]
    rows = [(fault["name"], _verdict(fault), fault["wanted"]) for fault in faults]
    lines = [table_text(("fault", "verdict", "where"), rows), ""]
    for fault in faults:
        if not (fault["is_caught"] and fault["is_localised"]):
            lines += [f"{fault['name']}: {fault['description']}", f"{INDENT}found: {fault['found']}"]
    control = "passed" if document["control_passed"] else "failed"
    lines.append(
        f"{document['num_localised']} of {document['num_faults']} faults caught where they were planted; "
        f"the control without a fault ({document['control']}) {control}"
    )
    return "\n".join(lines)


def _verdict(fault: Mapping[str, Any]) -> str:
    if not fault["is_caught"]:
        return "MISSED"
    return "caught" if fault["is_localised"] else "caught elsewhere"
