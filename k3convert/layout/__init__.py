"""Parallel layouts as text, and whether a network, a batch and a sequence can be laid out so."""

from k3convert.layout.legality import IllegalLayout, check_layout, layout_problems, nearest_legal
from k3convert.layout.text import LayoutSyntax, format_layout, parse_layout
from k3model.parallel.legality import Problem

__all__ = [
    "IllegalLayout",
    "LayoutSyntax",
    "Problem",
    "check_layout",
    "format_layout",
    "layout_problems",
    "nearest_legal",
    "parse_layout",
]
