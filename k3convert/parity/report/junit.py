"""The report as JUnit XML, for continuous integration."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from k3convert.parity.report.document import CellDocument, ParityReport

SUITE = "verify-parity"
# Characters that XML 1.0 has no form of.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(report: ParityReport, path: Path) -> None:
    """Write one test case a cell; a cell that was not run is skipped, one that could not finish is an error."""
    suite = ElementTree.Element("testsuite", name=SUITE, tests=str(len(report.cells)))
    cases = [_add_case(suite, cell) for cell in report.cells]
    for name, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(cases.count(name)))
    suite.set("time", f"{sum(cell.elapsed_s for cell in report.cells):.3f}")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _add_case(suite: ElementTree.Element, cell: CellDocument) -> str:
    """Add a cell, and return the name of its outcome's element; empty for a pass."""
    case = ElementTree.SubElement(
        suite, "testcase", classname=SUITE, name=_clean(cell.cell), time=f"{cell.elapsed_s:.3f}"
    )
    match cell.status:
        case "passed":
            return ""
        case "not run":
            ElementTree.SubElement(case, "skipped", message=_clean(cell.reason))
            return "skipped"
        case "failed" | "nondeterministic":
            name = "failure"
        case _:
            name = "error"
    ElementTree.SubElement(case, name, type=cell.status, message=_clean(message_of(cell))).text = _clean(_detail(cell))
    return name


def message_of(cell: CellDocument) -> str:
    """What went wrong, in a line."""
    found = cell.comparison
    if cell.unsteady:
        return f"{len(cell.unsteady)} tensors had other bits in a second run, first {cell.unsteady[0]}"
    if found is None:
        return cell.reason
    first = found.first_outside
    return f"{found.verdict}, headroom {found.headroom:.3g}" + (f", first outside {first.name}" if first else "")


def _detail(cell: CellDocument) -> str:
    found = cell.comparison
    lines = [f"{fault.name} ({fault.kind}): {fault.reason}" for fault in found.faults] if found else []
    if cell.divergence is not None:
        lines += [
            f"{each.place}: {each.candidate_value:.9g}, and the baseline has {each.baseline_value:.9g}"
            for each in cell.divergence.differences
        ]
    return "\n".join(lines)


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
