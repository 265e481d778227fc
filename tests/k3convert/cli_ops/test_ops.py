"""``k3convert ops``: the op table, for people and for programs."""

from __future__ import annotations

import json

import pytest

from k3convert.cli.app import run
from k3convert.errors import ExitCode
from k3convert.reporting.to_text import ops_text, table_text
from k3kernels import listing

USABLE = {"op": "kda", "variant": "chunk", "impl": "eager", "device": "any", "usable": True, "reason": None}
REFUSED = {
    "op": "kda",
    "variant": "chunk",
    "impl": "fla",
    "device": "cuda",
    "usable": False,
    "reason": "no CUDA device",
}


def test_json_holds_every_row_of_the_listing(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["ops", "--json"])

    document = json.loads(capsys.readouterr().out)
    assert code == ExitCode.DONE
    assert document["rows"] == [row.document() for row in listing(device=document["device"])]


def test_an_op_limits_the_listing_to_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["ops", "mxfp4", "--json"])

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert code == ExitCode.DONE
    assert {row["op"] for row in rows} == {"mxfp4"}


def test_every_implementation_has_a_line_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    run(["ops"])

    lines = capsys.readouterr().out.splitlines()
    shown = [tuple(line.split()[:3]) for line in lines[1 : 1 + len(listing())]]
    assert shown == [(row.op, row.variant, row.impl) for row in listing()]


def test_an_unknown_op_is_wrong_usage_and_the_message_lists_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["ops", "attention", "--json"])

    captured = capsys.readouterr()
    assert code == ExitCode.USAGE
    assert json.loads(captured.out)["error"]["code"] == "usage"
    assert "mla_attention" in captured.err


def test_the_text_says_yes_or_why_not() -> None:
    text = ops_text({"device": "cpu", "rows": [USABLE, REFUSED]})

    assert text.splitlines() == [
        "op   variant  impl   device  usable here",
        "kda  chunk    eager  any     yes",
        "kda  chunk    fla    cuda    no: no CUDA device",
        "",
        "1 of 2 implementations are usable on this machine's cpu",
    ]


def test_a_table_puts_numbers_to_the_right_and_text_to_the_left() -> None:
    text = table_text(("name", "count", "note"), [("a", 7, "x"), ("longer", 12345, "yy")])

    assert text.splitlines() == ["name     count  note", "a            7  x", "longer  12,345  yy"]
