"""The HTML report: well formed, escaped, closed to the network, and true to its numbers."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from k3convert.reporting.html_page import (
    Facts,
    HeatMap,
    Histogram,
    LineChart,
    Mark,
    Node,
    Page,
    Preformatted,
    Section,
    Series,
    Status,
    Table,
    Text,
    Tree,
    number_text,
    render_page,
    write_page,
)

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=y>&amp;"
VOID = {"wbr", "meta", "br", "img", "input", "hr", "link"}


class Elements(HTMLParser):
    """Collects elements and text, and complains where tags do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.found if found == tag]


def parsed(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    elements.close()
    assert not elements.open
    return elements


def page_with(*blocks: object, title: str = "Report") -> str:
    return render_page(Page(title, [Section("Only", blocks)]))  # type: ignore[arg-type]


def every_block(name: str) -> Page:
    return Page(
        name,
        [
            Section(name, [Facts({name: name}), Text(name), Preformatted(name)], note=name),
            Section("Tables", [Table([name, "n"], [[name, 1], [Mark(Status.BAD, name), None]], caption=name)]),
            Section(
                "Charts",
                [
                    LineChart([Series(name, [1.0, 2.0])], name, name, name, levels={name: 1.5}),
                    Histogram({name: 3}, name, name, name),
                    HeatMap([name], [name], [[0.5]], name, name, zero_text=name),
                ],
            ),
            Section("Tree", [Tree([Node(name, Status.BAD, {name: name}, [Node(name)])])]),
        ],
        verdict=Mark(Status.BAD, name),
        subtitle=name,
    )


def test_every_block_is_well_formed_html() -> None:
    elements = parsed(render_page(every_block("plain")))

    assert {"dl", "table", "svg", "details", "pre", "nav"} <= {tag for tag, _ in elements.found}


def test_hostile_names_stay_text_wherever_they_stand() -> None:
    elements = parsed(render_page(every_block(HOSTILE)))

    assert not elements.named("script")
    assert not elements.named("img")
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert "".join(elements.text).count(HOSTILE) > 10


def test_nothing_is_fetched_and_no_script_is_needed() -> None:
    text = render_page(every_block("plain"))

    elements = parsed(text)
    links = [a["href"] for _, a in elements.found if "href" in a]
    assert links
    assert all(link is not None and link.startswith("#") for link in links)
    assert not [a for _, a in elements.found if {"src", "srcset", "xlink:href", "action"} & set(a)]
    assert not elements.named("script")
    assert not elements.named("link")
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in str(elements.named("meta"))


def test_dark_readers_get_their_own_colours_for_everything_that_has_one() -> None:
    text = render_page(every_block("plain"))

    light, dark = (set(re.findall(r"(--[\w-]+):", part)) for part in re.findall(r":root \{(.*?)\}", text, re.S))
    assert light == dark
    assert light >= set(re.findall(r"var\((--[\w-]+)\)", text)) - {"--c"}
    assert "prefers-color-scheme: dark" in text


def test_columns_of_numbers_stand_to_the_right_and_others_do_not() -> None:
    text = page_with(Table(["name", "count", "mixed"], [["a", 1234567, 1], ["b", None, "x"]]))

    classes = [a.get("class") for a in parsed(text).named("td")]
    assert classes == [None, "number", None] * 2
    assert "1,234,567" in text


def test_a_status_has_a_symbol_and_not_a_colour_alone() -> None:
    text = "".join(parsed(page_with(Table(["v"], [[Mark(status, status.value)] for status in Status]))).text)

    for status in Status:
        assert re.search(re.escape(status.symbol) + r"\s+" + status.value, text)
    assert len({status.symbol for status in Status}) == len(Status)


def test_a_line_has_a_gap_where_its_value_is_not_finite() -> None:
    chart = LineChart([Series("loss", [1.0, 2.0, math.nan, 3.0, math.inf, 2.0, 1.0])])

    lines = [a["points"] for a in parsed(page_with(chart)).named("polyline")]
    circles = parsed(page_with(chart)).named("circle")
    assert [len(str(points).split()) for points in lines] == [2, 2]
    assert len(circles) == 5  # the lone point between two gaps is drawn too


def test_values_of_zero_and_below_are_gaps_on_a_logarithmic_axis() -> None:
    chart = LineChart([Series("error", [1e-3, 0.0, 1e-5, 1e-7])], log_y=True)

    points = [a["points"] for a in parsed(page_with(chart)).named("polyline")]
    assert len(points) == 1
    heights = [float(str(c["cy"])) for c in parsed(page_with(chart)).named("circle")]
    assert heights[2] - heights[1] == pytest.approx(heights[1] - heights[0], abs=0.02)  # places are in hundredths


@pytest.mark.parametrize("values", [[], [math.nan], [0.0], [5.0, 5.0], [-1e300, 1e300], [1e-320, 1e-310]])
def test_degenerate_series_are_drawn(values: list[float]) -> None:
    for log_y in (False, True):
        elements = parsed(page_with(LineChart([Series("s", values)], log_y=log_y)))

        numbers = [str(a["cy"]) for a in elements.named("circle")]
        assert all(math.isfinite(float(number)) for number in numbers)


def test_a_chart_names_its_series_axes_and_levels() -> None:
    chart = LineChart([Series("fla", [1.0]), Series("eager", [2.0])], "Loss", "step", "nats", levels={"ln V": 1.5})

    text = "".join(parsed(page_with(chart)).text)
    for name in ("fla", "eager", "Loss", "step", "nats", "ln V 1.5"):
        assert name in text


def test_bars_are_as_high_as_their_counts() -> None:
    bars = parsed(page_with(Histogram({"0": 4, "1": 2, "2": 0}))).named("rect")

    heights = [float(str(bar["height"])) for bar in bars]
    assert heights[1] == pytest.approx(heights[0] / 2, abs=0.01)
    assert heights[2] == 0


def test_a_heat_map_marks_what_is_beyond_the_limit_and_leaves_gaps() -> None:
    text = page_with(HeatMap(["cell"], list("abcde"), [[0.0, 0.5, 1.0, 1.01, None]], zero_text="="))

    cells = [str(a["class"]) for a in parsed(text).named("td")]
    assert cells == ["h0", "h4", "h9", "h9 beyond", "none"]
    assert text.count("✗") == 1
    assert ">=</td>" in text


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "NaN ✗"), (math.inf, "∞ ✗")])
def test_what_is_not_finite_is_beyond_every_limit_of_a_heat_map(value: float, shown: str) -> None:
    text = page_with(HeatMap(["cell"], ["a"], [[value]]))

    assert "beyond" in str(parsed(text).named("td"))
    assert shown in text


def test_an_open_node_shows_its_children_at_once() -> None:
    tree = Tree([Node("layer 3", Status.BAD, children=[Node("q_proj")], is_open=True), Node("x", facts={"a": 1})])

    details = parsed(page_with(tree)).named("details")
    assert ["open" in attributes for attributes in details] == [True, False]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567, "1,234,567"),
        (0.125, "0.125"),
        (-1e-9, "−1.000e−9"),
        (12345.6, "12,346"),
        (math.nan, "NaN"),
        (0.0, "0"),
    ],
)
def test_numbers_are_written_for_people(value: float, text: str) -> None:
    assert number_text(value) == text


def test_ragged_tables_and_grids_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 rows"):
        Table(["a", "b"], [[1, 2], [1]])
    with pytest.raises(ValueError, match="1 rows of 2"):
        HeatMap(["r"], ["a", "b"], [[1.0]])
    with pytest.raises(ValueError, match="2 x and 1 y"):
        Series("s", [1.0], [0.0, 1.0])


def test_the_file_is_utf8_and_the_same_each_time(tmp_path: Path) -> None:
    page = every_block("größe ✗")

    write_page(page, tmp_path / "a.html")
    write_page(page, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert "größe ✗" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_a_long_name_may_break_at_its_dots_and_is_still_the_name() -> None:
    name = "language_model.model.layers.0,<b>"

    text = page_with(Table(["name"], [[name]]))
    assert "layers.<wbr>0,<wbr>&lt;b&gt;" in text
    assert name in "".join(parsed(text).text)


def test_large_counts_are_short_above_their_bars_and_exact_in_the_tooltip() -> None:
    text = page_with(Histogram({"0": 4_843_922, "1": 12_345_678, "2": 999}))

    for shown in (">4.8M<", ">12.3M<", ">999<", "0: 4,843,922<", "1: 12,345,678<"):
        assert shown in text
