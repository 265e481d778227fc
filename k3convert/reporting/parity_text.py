"""The document of ``verify-parity`` as text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from k3convert.reporting.to_text import INDENT, table_text

SYMBOLS = {"passed": "✓", "failed": "✗", "nondeterministic": "✗", "died": "✗", "refused": "!", "not run": "–"}
_COLOURS = {"✓": "32", "✗": "31", "!": "33", "–": "2"}
_ORDER = ("failed", "nondeterministic", "died", "refused", "passed", "not run")
SHOWN_POOLS = 10
SHOWN_FAULTS = 5
SHOWN_DIFFERENCES = 3
LONGEST_REASON = 100


def parity_text(document: Mapping[str, Any], *, colour: bool = False) -> str:
    """One line a cell, the worst first, then the worst pools of what failed and where it begins.

    Args:
        document: the report's, as JSON has it.
        colour: whether symbols are coloured; the environment's ``NO_COLOR`` has the last word.
    """
    cells = sorted(document["cells"], key=lambda cell: (_ORDER.index(cell["status"]), -_headroom(cell)))
    rows = [
        (
            f"{SYMBOLS[cell['status']]} {cell['status']}", cell["cell"], _verdict(cell), _headroom_text(cell),
            f"{cell['elapsed_s']:.1f}", _shortened(_what(cell)),
        )
        for cell in cells
    ]  # fmt: skip
    lines = [table_text(("status", "cell", "verdict", "headroom", "seconds", "what"), rows)]
    for cell in cells:
        if cell["status"] in ("failed", "nondeterministic"):
            lines += ["", *_failure(cell)]
    numbers = ", ".join(f"{count} {status}" for status, count in document["counts"].items())
    lines += ["", f"{'passed' if document['passed'] else 'NOT PASSED'}: {numbers}", *_limits(document["limits"])]
    text = "\n".join(lines)
    return _coloured(text) if colour and not os.environ.get("NO_COLOR") else text


def _verdict(cell: Mapping[str, Any]) -> str:
    return cell["comparison"]["verdict"] if cell["comparison"] else ""


def _headroom(cell: Mapping[str, Any]) -> float:
    return float(cell["comparison"]["headroom"]) if cell["comparison"] else 0.0


def _headroom_text(cell: Mapping[str, Any]) -> str:
    return f"{_headroom(cell):.2f}" if cell["comparison"] else ""


def _what(cell: Mapping[str, Any]) -> str:
    found = cell["comparison"]
    if cell["unsteady"]:
        return f"{len(cell['unsteady'])} tensors are not the same twice, first {cell['unsteady'][0]}"
    if not found:
        return str(cell["reason"])
    if found["first_outside"]:
        return f"begins at {found['first_outside']['name']} ({found['first_outside']['kind']})"
    return f"{found['num_bitwise']} of {found['num_tensors']} tensors bitwise" + _flips(found)


def _flips(found: Mapping[str, Any]) -> str:
    flips = sum(layer["num_flips"] for layer in found["routing"])
    return f", {flips} routing flips within noise" if flips else ""


def _failure(cell: Mapping[str, Any]) -> list[str]:
    lines = [f"{SYMBOLS[cell['status']]} {cell['cell']}"]
    found, divergence = cell["comparison"], cell["divergence"]
    if cell["unsteady"]:
        lines.append(f"{INDENT}not the same twice: {', '.join(cell['unsteady'][:SHOWN_FAULTS])}")
    if found:
        for each in found["scalars"]:
            values = (float(each[run]) for run in ("candidate", "baseline", "golden"))
            lines.append(f"{INDENT}{each['kind']}: " + "{:.9g}, baseline {:.9g}, golden {:.9g}".format(*values))
        lines += [
            f"{INDENT}fault: {fault['name']} ({fault['kind']}): {fault['reason']}"
            for fault in found["faults"][:SHOWN_FAULTS]
        ]
        pools = [
            (pool["path"], pool["kind"], f"{float(pool['headroom']):.2f}", *_worst_gate(pool))
            for pool in found["pools"][:SHOWN_POOLS] if pool["is_outside"]
        ]  # fmt: skip
        if pools:
            table = table_text(("pool", "kind", "headroom", "limit", "measured", "allowed"), pools)
            lines += [INDENT + line for line in table.splitlines()]
    if divergence:
        lines.append(f"{INDENT}{divergence['module'] or 'no module'} on the baseline's inputs: {divergence['origin']}")
        lines += [
            f"{INDENT}{INDENT}{each['place']}: {float(each['candidate_value']):.9g}, and the baseline has "
            f"{float(each['baseline_value']):.9g}" + ("" if each["ulps"] is None else f" ({each['ulps']:,} ULP apart)")
            for each in divergence["differences"][:SHOWN_DIFFERENCES]
        ]
    return lines


def _worst_gate(pool: Mapping[str, Any]) -> tuple[str, str, str]:
    gate = max(pool["gates"], key=lambda gate: float(gate["headroom"]))
    return gate["limit"], f"{float(gate['measured']):.3g}", f"{float(gate['allowed']):.3g}"


def _limits(limits: Sequence[Mapping[str, Any]]) -> list[str]:
    if not limits:
        return []
    return ["", "limits:", *(f"{INDENT}{each['name']} {float(each['value']):g}: {each['origin']}" for each in limits)]


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def _coloured(text: str) -> str:
    """Symbols at the beginning of a line in their colour."""
    lines = []
    for line in text.splitlines():
        code = _COLOURS.get(line[:1])
        lines.append(f"\x1b[{code}m{line[0]}\x1b[0m{line[1:]}" if code else line)
    return "\n".join(lines)
