"""The report: a document that survives its file, and the page, the XML and the text that are made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from k3convert.errors import UsageError
from k3convert.parity.cells import Cell, parse_cell
from k3convert.parity.comparison import compare
from k3convert.parity.divergence import Divergence, IsolatedDifference, Origin
from k3convert.parity.expectation import EVERYTHING, FORWARD, Expectation
from k3convert.parity.outcome import CellOutcome, Status, status_of
from k3convert.parity.records import Entry, Kind, Run
from k3convert.parity.report.build import build_report
from k3convert.parity.report.document import (
    BadReport,
    ParityReport,
    SessionDocument,
    json_text,
    read_json,
    schema_text,
    write_json,
)
from k3convert.parity.report.html import page_of, worst_first, write_html
from k3convert.parity.report.junit import write_junit
from k3convert.reporting.html_page import render_page
from k3convert.reporting.parity_text import parity_text
from k3model.config import KimiK3Config
from k3model.presets import tiny_config_dict

MakeRun = Callable[..., Run]
ROOT = Path(__file__).parents[4]
SCHEMA = ROOT / "docs" / "reference" / "parity-report.schema.json"
Q_PROJ = "language_model.model.layers.1.self_attn.q_proj"
HOSTILE = "<script>alert(1)</script>\x00"
SESSION = SessionDocument(
    checkpoint="/models/k3 <tiny>", weights_digest="ab" * 32, seed=0, rows=2, tokens=32, num_layers=None,
    level="model", device="cpu", golden_dtype="fp64", pins_shapes=True, deterministic=False, fault=None, perturbs=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def config() -> KimiK3Config:
    return KimiK3Config.from_dict(tiny_config_dict())


@pytest.fixture
def outcomes(make_run: MakeRun) -> tuple[CellOutcome, ...]:
    """One of every status; the failed one has an infinite headroom."""
    noise = {"dtype": torch.bfloat16, "noise": 3e-3}
    golden, baseline = make_run(dtype=torch.float64), make_run(**noise)
    bad = make_run(**(noise | {"seed": 1}), changes={(Kind.OUTPUT, Q_PROJ): lambda value: value * 1.1})

    def outcome(text: str, candidate: Run, expectation: Expectation, **more: Any) -> CellOutcome:
        cell = parse_cell(text)
        found = compare(cell, golden, baseline, candidate, expectation)
        figures = {"elapsed_s": 2.5, "step_s": 1.0, "baseline_step_s": 0.5, "peak_bytes": 3 << 20}
        return CellOutcome(
            cell, status_of(found, more.get("unsteady", ())), expectation.reason, found, flags={"threads": "1"},
            **(figures | more),
        )  # fmt: skip

    entry = Entry(Kind.OUTPUT, Q_PROJ, 0, "Linear", 1, "kda/chunk/fla", "bfloat16", (2, 32, 24))
    divergence = Divergence(
        entry, Q_PROJ, Origin.MODULE, (IsolatedDifference(entry, (1, 17, 6), 1.0, 1.0078125, 30, 1536),)
    )  # fmt: skip
    return (
        outcome("sp=2,dtype=bf16", make_run(**noise, ranks=2), Expectation(EVERYTHING, "copies")),
        outcome("cp=2,dtype=bf16", make_run(**(noise | {"seed": 1})), Expectation(frozenset(), "other order")),
        outcome("ep=2,dtype=bf16", bad, Expectation(FORWARD, "rows are alike"), divergence=divergence),
        outcome("fsdp=2,dtype=bf16", baseline, Expectation(EVERYTHING, "copies"), unsteady=("loss (loss)",)),
        CellOutcome(Cell(), Status.NOT_RUN, f"needs 4 heads {HOSTILE}"),
        CellOutcome(parse_cell("pp=2"), Status.DIED, "rank 1 died", error=UsageError("rank 1 died", hint="look")),
        CellOutcome(parse_cell("sp=4"), Status.REFUSED, "sp=4 does not divide 6 heads"),
    )


@pytest.fixture
def report(outcomes: tuple[CellOutcome, ...], config: KimiK3Config) -> ParityReport:
    return build_report(outcomes, SESSION, config)


def test_a_report_survives_its_file(report: ParityReport, tmp_path: Path) -> None:
    write_json(report, tmp_path / "report.json")

    assert read_json(tmp_path / "report.json") == report


def test_the_file_is_strict_json_of_a_stable_order(
    outcomes: tuple[CellOutcome, ...], config: KimiK3Config, report: ParityReport
) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    raw = json.loads(json_text(report), parse_constant=refuse)
    assert list(raw)[:4] == ["schema_version", "tool", "passed", "counts"]
    assert raw["cells"][2]["comparison"]["headroom"] == "Infinity"
    assert json_text(report) == json_text(build_report(outcomes, SESSION, config))


def test_the_published_schema_is_that_of_the_document() -> None:
    assert SCHEMA.read_text() == schema_text(), "write it again: python -m k3convert.parity.report.document > " + str(
        SCHEMA
    )


def test_the_schema_allows_what_the_report_holds(report: ParityReport) -> None:
    schema = json.loads(schema_text())
    raw = json.loads(json_text(report))

    assert set(raw) == set(schema["properties"]) == set(schema["required"])
    cell = schema["$defs"]["CellDocument"]
    assert {each["status"] for each in raw["cells"]} <= set(cell["properties"]["status"]["enum"])
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "schema_version is None"),
        ('{"schema_version": 2}', "schema_version is 2"),
        ('{"schema_version": 1, "tool": 3}', "fields are wrong"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)

    with pytest.raises(BadReport, match=message):
        read_json(path)


def test_cells_that_were_not_run_are_no_pass_and_no_failure(
    outcomes: tuple[CellOutcome, ...], config: KimiK3Config
) -> None:
    passed, not_run = outcomes[0], outcomes[4]

    assert build_report([passed, not_run], SESSION, config).passed
    assert not build_report([not_run], SESSION, config).passed
    assert not build_report([], SESSION, config).passed
    for other in outcomes[2:4] + outcomes[5:]:
        assert not build_report([passed, other], SESSION, config).passed


def test_a_failed_cell_says_where_it_begins(report: ParityReport) -> None:
    failed = report.cells[2]

    assert failed.comparison is not None
    assert failed.comparison.first_outside is not None
    assert failed.comparison.first_outside.layer == 0
    assert failed.divergence is not None
    assert failed.divergence.differences[0].ulps == 1
    assert failed.divergence.differences[0].place.startswith("layer 1 (KDA), ")
    listed = next(tensor for tensor in failed.comparison.tensors if tensor.tensor.name == Q_PROJ)
    assert listed.is_outside
    assert "row" in str(listed.place)


def test_listed_tensors_are_bounded_and_the_worst(outcomes: tuple[CellOutcome, ...], config: KimiK3Config) -> None:
    found = build_report(outcomes[2:3], SESSION, config, listed_tensors=3).cells[0].comparison

    assert found is not None
    assert len(found.tensors) == 3
    assert all(tensor.is_outside for tensor in found.tensors)
    assert len(found.pools) > 3


def test_every_limit_of_the_report_has_its_origin(report: ParityReport) -> None:
    names = {limit.name for limit in report.limits}

    gates = [
        gate for cell in report.cells if cell.comparison for each in (*cell.comparison.pools, *cell.comparison.tensors)
        for gate in each.gates
    ]  # fmt: skip
    assert {gate.limit for gate in gates} <= names
    assert all(limit.origin for limit in report.limits)


def test_bitwise_runs_have_equal_digests(report: ParityReport) -> None:
    first, other, equal = (report.cells[place].comparison for place in (0, 1, 3))

    assert first is not None
    assert other is not None
    assert equal is not None
    assert first.digests == equal.digests
    assert first.digests["output"] != other.digests["output"]


class Words(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_shows_all_that_a_reader_needs(report: ParityReport, tmp_path: Path) -> None:
    write_html(report, tmp_path / "report.html")

    words = Words()
    words.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    text = "".join(words.text)
    for cell in report.cells:
        assert cell.cell in text
        assert cell.status in text
    for needed in (
        "Not passed", "Headroom by layer", "Where differences begin", "Distances from the baseline", "Limits",
        "Time and memory", "units in the last place", "head ", Q_PROJ, "kda/chunk/fla", "needs 4 heads",
        "mean KL", "weights_digest", "threads=1", *(limit.origin for limit in report.limits),
    ):  # fmt: skip
        assert needed in text, needed
    assert "script" not in words.tags
    assert "<script>alert" in text


def test_a_page_without_any_comparison_is_a_page(config: KimiK3Config) -> None:
    report = build_report([CellOutcome(Cell(), Status.NOT_RUN, "no device")], SESSION, config)

    assert "no device" in render_page(page_of(report))


def test_the_worst_cells_come_first(report: ParityReport) -> None:
    statuses = [cell.status for cell in worst_first(report.cells)]

    assert set(statuses[:3]) == {"failed", "nondeterministic", "died"}
    assert statuses[3:] == ["refused", "passed", "passed", "not run"]
    assert worst_first(report.cells)[0].status == "failed"


def test_junit_counts_failures_errors_and_skips(report: ParityReport, tmp_path: Path) -> None:
    write_junit(report, tmp_path / "junit.xml")

    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "7", "failures": "2", "errors": "2", "skipped": "1",
    }  # fmt: skip
    failure = next(case for case in suite if str(case.get("name")).startswith("ep=2,dtype=bf16"))[0]
    assert failure.tag == "failure"
    assert "first outside" in str(failure.get("message"))
    assert "position 17" in str(failure.text)
    skipped = next(case for case in suite if case.find("skipped") is not None)[0]
    assert str(skipped.get("message")).startswith("needs 4 heads <script>")


def test_the_text_has_a_line_a_cell_the_worst_first(report: ParityReport) -> None:
    text = parity_text(report.model_dump(mode="json"))

    lines = text.splitlines()
    assert lines[1].startswith("✗ failed")
    assert "inf" in lines[1]
    assert lines[len(report.cells)].startswith("– not run")
    assert "position 17" in text
    assert "1 ULP apart" in text
    assert "NOT PASSED: 1 died, 1 failed" in text
    assert all(limit.origin in text for limit in report.limits)
    assert "\x1b" not in text


def test_colour_is_asked_for_and_no_color_refuses_it(report: ParityReport, monkeypatch: pytest.MonkeyPatch) -> None:
    document = report.model_dump(mode="json")

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31m✗" in parity_text(document, colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in parity_text(document, colour=True)


def test_environment_names_the_machine_and_the_libraries(report: ParityReport) -> None:
    assert report.environment["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"python", "system", "processor", "cpu_capability", "k3convert"} <= set(report.environment)


def test_outcomes_are_not_changed_by_reporting(outcomes: tuple[CellOutcome, ...], config: KimiK3Config) -> None:
    before = replace(outcomes[0])

    build_report(outcomes, SESSION, config)
    assert outcomes[0] == before
