"""A report as files of a folder: ``report.json``, ``report.html``, ``junit.xml``."""

from __future__ import annotations

from pathlib import Path

from k3convert.parity.report.document import ParityReport, write_json
from k3convert.parity.report.html import write_html
from k3convert.parity.report.junit import write_junit

JSON_NAME, HTML_NAME, JUNIT_NAME = "report.json", "report.html", "junit.xml"


def write_report(report: ParityReport, folder: Path) -> None:
    """Write all three; the folder is made, files of an earlier report are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    write_html(report, folder / HTML_NAME)
    write_junit(report, folder / JUNIT_NAME)
    write_json(report, folder / JSON_NAME)
