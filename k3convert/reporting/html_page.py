"""A report as one HTML file: light and dark, readable without scripts, with nothing to fetch.

A page is data (``page_blocks``); the template turns it into markup and escapes every text on the way. Charts are inline
SVG drawn from ``chart_geometry``; exact values are in tooltips, and every colour has a symbol or a word beside it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from markupsafe import Markup, escape

from k3convert.reporting import chart_geometry
from k3convert.reporting.page_blocks import (
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
    value_text,
)

__all__ = [
    "Facts",
    "HeatMap",
    "Histogram",
    "LineChart",
    "Mark",
    "Node",
    "Page",
    "Preformatted",
    "Section",
    "Series",
    "Status",
    "Table",
    "Text",
    "Tree",
    "number_text",
    "render_page",
    "value_text",
    "write_page",
]

TEMPLATE = "page.html.jinja"


def render_page(page: Page) -> str:
    """The page as HTML text."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_template_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"value": value_text, "number": number_text, "breakable": _breakable}
    environment.tests |= {"mark": lambda value: isinstance(value, Mark)}
    environment.globals |= {
        "line_plot": chart_geometry.line_plot,
        "bar_plot": chart_geometry.bar_plot,
        "kind_of": lambda block: type(block).__name__,
    }
    return environment.get_template(TEMPLATE).render(page=page)


def write_page(page: Page, path: Path) -> None:
    """Write the page as one UTF-8 file."""
    path.write_text(render_page(page), encoding="utf-8")


def _breakable(text: str) -> Markup:
    """The text, escaped, that may break after the dots, commas and underscores of a name."""
    escaped = str(escape(text))
    for character in ".,_":
        escaped = escaped.replace(character, f"{character}<wbr>")
    return Markup(escaped)


def _template_source(name: str) -> str:
    return files("k3convert.reporting").joinpath("templates", name).read_text(encoding="utf-8")
