"""XTML, the tag language of K3 conversations: four control tokens around ordinary text.

A tag is ``<|open|>name key="value"<|sep|>``, its end ``<|close|>name<|sep|>``. The pieces are tokenized one by one, so
the borders between them are part of the format (Kimi K3 report, appendix F, and the released chat encoder).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEPARATOR = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"


class Segment(NamedTuple):
    """A piece of a conversation that is tokenized on its own.

    Attributes:
        text: never empty.
        is_control: special tokens in ``text`` are recognized; otherwise every character is ordinary text.
        is_trained: the piece is part of what the assistant says, so a training loss counts it.
    """

    text: str
    is_control: bool
    is_trained: bool = False


def control(text: str) -> Iterator[Segment]:
    """A piece in which special tokens count."""
    yield Segment(text, True)


def plain(text: str) -> Iterator[Segment]:
    """A piece of ordinary text; nothing where the text is empty."""
    if text:
        yield Segment(text, False)


def open_tag(name: str, attributes: Sequence[tuple[str, object]] = ()) -> Iterator[Segment]:
    """The opening tag. ``&`` and ``"`` in attribute values are escaped, nothing else."""
    yield from control(OPEN)
    yield from plain(name)
    for key, value in attributes:
        yield from plain(f" {key}")
        yield from plain('="')
        yield from plain(str(value).replace("&", "&amp;").replace('"', "&quot;"))
        yield from plain('"')
    yield from control(SEPARATOR)


def close_tag(name: str) -> Iterator[Segment]:
    """The closing tag."""
    yield from control(CLOSE)
    yield from plain(name)
    yield from control(SEPARATOR)


def compact_json(value: object) -> str:
    """JSON as declarations hold it: keys sorted at every depth, no spaces, no escapes for non-ASCII text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


class Argument(NamedTuple):
    """One argument of a tool call: its key, its XTML type and the text between the tags."""

    key: str
    type: str
    text: str


def arguments_of_mapping(arguments: Mapping[str, Any]) -> list[Argument]:
    """Arguments that arrived as an object: strings stay as they are, the rest is written as JSON."""
    return [
        Argument(key, _type_of(value), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in arguments.items()
    ]


def arguments_of_text(text: str) -> list[Argument] | None:
    """Arguments that arrived as JSON text: every value but a string keeps its own source text (``1e2``, ``[1,2]``).

    Returns:
        The arguments in source order, or None where the text is no JSON.

    Raises:
        ValueError: the text is JSON of another kind than an object.
    """
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(whole, dict):
        raise ValueError(f"the arguments of a tool call must be a JSON object, got {text!r}")
    return [
        Argument(key, _type_of(value), value if isinstance(value, str) else source)
        for key, (value, source) in _members(text).items()
    ]


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of the object in ``text``, which is valid JSON: value and source text. The last duplicate counts."""
    decoder = json.JSONDecoder()
    members: dict[str, tuple[Any, str]] = {}
    position = _skip_spaces(text, text.index("{") + 1)
    while text[position] != "}":
        key, position = decoder.raw_decode(text, position)
        start = _skip_spaces(text, text.index(":", position) + 1)
        value, end = decoder.raw_decode(text, start)
        members[key] = (value, text[start:end])
        position = _skip_spaces(text, end)
        if text[position] == ",":
            position = _skip_spaces(text, position + 1)
    return members


def _skip_spaces(text: str, position: int) -> int:
    while text[position] in " \t\r\n":
        position += 1
    return position


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"
