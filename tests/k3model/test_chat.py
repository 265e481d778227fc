"""Conversations become the segments the released encoder makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3model.chat import IMAGE_PLACEHOLDER, THINKING_EFFORTS, render, segments

HELLO = [{"role": "user", "content": "Hello"}]


def text_of(messages: list[dict[str, Any]], **options: Any) -> str:
    return "".join(text for text, _ in segments(messages, **options))


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "Done.", **fields}


def call(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    function = {"function": {"name": name, "arguments": arguments}}
    return function if call_id is None else {"id": call_id, **function}


@pytest.mark.parametrize(
    "name", ["plain", "thinking", "literal_markers", "typed_tools", "tool_declaration", "required"]
)
def test_the_released_encoder_makes_the_same_segments(reference_fixtures: Path, name: str) -> None:
    cases = json.loads((reference_fixtures / "xtml" / "cases.json").read_text("utf-8"))["cases"]
    case = next(case for case in cases if case["name"] == name)

    got = segments(case["messages"], **case["kwargs"])

    assert got == [tuple(segment) for segment in case["segments"]]


def test_the_cases_tried_above_are_all_there_are(reference_fixtures: Path) -> None:
    cases = json.loads((reference_fixtures / "xtml" / "cases.json").read_text("utf-8"))["cases"]

    assert len(cases) == 6


def test_attribute_values_escape_ampersands_and_quotes_only() -> None:
    rendered = segments([{"role": "user", "name": 'A&B"<C', "content": "hi"}])

    assert ("A&amp;B&quot;<C", False) in rendered


def test_tool_results_are_sorted_and_named_after_the_calls_they_answer() -> None:
    messages = [
        assistant(tool_calls=[call("weather", {}, "a"), call("clock", {}, "b")]),
        {"role": "tool", "tool_call_id": "b", "name": "stale", "content": "12:00"},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]

    text = text_of(messages)

    first = 'role="tool" tool="weather" index="1"<|sep|>sunny'
    second = 'role="tool" tool="clock" index="2"<|sep|>12:00'
    assert text.index(first) < text.index(second)


def test_tool_results_without_ids_answer_the_calls_in_order() -> None:
    messages = [assistant(tool_calls=[call("weather", {})]), {"role": "tool", "content": "sunny"}]

    assert 'tool="weather" index="1"' in text_of(messages)


def test_a_tool_result_that_answers_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="names no tool"):
        segments([{"role": "tool", "content": "?"}])


def test_arguments_given_as_text_keep_their_source_text() -> None:
    arguments = '{ "days" : 1e2, "xs": [1,  2], "deep": {"a": "}\\u00e9"}, "text": "caf\\u00e9", "none": null }'

    text = text_of([assistant(tool_calls=[call("f", arguments)])])

    assert 'key="days" type="number"<|sep|>1e2<|close|>' in text
    assert 'key="xs" type="array"<|sep|>[1,  2]<|close|>' in text
    assert 'key="deep" type="object"<|sep|>{"a": "}\\u00e9"}<|close|>' in text
    assert 'key="text" type="string"<|sep|>café<|close|>' in text
    assert 'key="none" type="null"<|sep|>null<|close|>' in text


def test_arguments_given_as_an_object_are_written_as_json() -> None:
    text = text_of([assistant(tool_calls=[call("f", {"xs": [1, 2], "ok": True, "s": "é"})])])

    assert 'type="array"<|sep|>[1, 2]<|close|>' in text
    assert 'type="boolean"<|sep|>true<|close|>' in text
    assert 'type="string"<|sep|>é<|close|>' in text


def test_arguments_that_are_no_json_stand_in_one_block() -> None:
    text = text_of([assistant(tool_calls=[call("f", '{"city":')])])

    assert '<|open|>json type="object"<|sep|>{"city":<|close|>json<|sep|>' in text


def test_arguments_that_are_json_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON object"):
        segments([assistant(tool_calls=[call("f", "[1]")])])


@pytest.mark.parametrize("effort", THINKING_EFFORTS)
def test_row_63_every_released_thinking_effort_is_written(effort: str) -> None:
    text = text_of(HELLO, thinking_effort=effort)

    assert text.startswith('<|open|>message role="system" type="thinking-effort"<|sep|>')
    assert f"`thinking_effort={effort}`" in text


@pytest.mark.parametrize("effort", ["medium", "LOW", ""])
@pytest.mark.parametrize("thinking", [True, False])
def test_row_63_any_other_effort_is_refused_by_name_with_the_choices(effort: str, thinking: bool) -> None:
    with pytest.raises(ValueError, match=f"low, high, max; got '{effort}'"):
        segments(HELLO, thinking=thinking, thinking_effort=effort)


def test_row_86_every_advertised_effort_is_accepted() -> None:
    text = text_of(HELLO, thinking_effort="low")

    advertised = text.split("supported values include ")[1].split(".\n")[0]
    names = advertised.split("`")[1::2]
    assert tuple(names) == THINKING_EFFORTS
    for name in names:
        segments(HELLO, thinking_effort=name)


def test_without_thinking_the_history_has_no_think_channel() -> None:
    text = text_of([assistant(reasoning_content="Hm.")], thinking=False)

    assert "think" not in text
    assert "Hm." not in text


def test_with_thinking_every_turn_has_a_think_channel_even_an_empty_one() -> None:
    text = text_of([assistant()], add_generation_prompt=False)

    assert "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>Done." in text


def test_options_stand_before_and_after_the_conversation() -> None:
    text = text_of(
        HELLO,
        tools=[{"type": "function"}],
        thinking_effort="max",
        tool_choice="none",
        response_format={"type": "json_schema", "json_schema": {"schema": {"b": 1, "a": 2}}},
    )

    order = ["tool-declare", "thinking-effort", "Hello", "tool-choice", "response-format", 'role="assistant"']
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    assert "You MUST NOT call any tools" in text
    assert '```json\n{"a":2,"b":1}\n```' in text


def test_tools_on_a_system_message_extend_the_toolset_there() -> None:
    text = text_of([*HELLO, {"role": "system", "tools": [{"name": "x"}]}])

    assert text.index("Hello") < text.index("## New Tools Available")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": "xml"}, "response_format"),
        ({"response_format": "json_schema"}, "json_schema"),
    ],
)
def test_an_unknown_option_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        segments(HELLO, **options)


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="message 0 has role 'critic'"):
        segments([{"role": "critic", "content": "x"}])


def test_images_take_their_prompts_in_order_as_control_text() -> None:
    content = [{"type": "image"}, {"type": "text", "text": f"and {IMAGE_PLACEHOLDER}."}]

    rendered = render([{"role": "user", "content": content}], image_prompts=["<1>", "<2>"])

    pieces = [(segment.text, segment.is_control) for segment in rendered[7:11]]
    assert pieces == [("<1>", True), ("and ", False), ("<2>", True), (".", False)]


@pytest.mark.parametrize("prompts", [[], ["<1>", "<2>"]])
def test_a_number_of_images_that_is_not_the_number_of_prompts_is_refused(prompts: list[str]) -> None:
    with pytest.raises(ValueError, match="1 images"):
        render([{"role": "user", "content": [{"type": "image"}]}], image_prompts=prompts)


def test_the_loss_counts_what_the_assistant_says_and_nothing_else() -> None:
    messages = [*HELLO, assistant(reasoning_content="Hm.", tool_calls=[call("f", {"x": 1}), call("g", "{broken")])]

    rendered = render(messages)

    trained = "".join(segment.text for segment in rendered if segment.is_trained)
    assert trained.startswith("<|open|>think<|sep|>Hm.")
    assert trained.endswith("<|close|>message<|sep|><|end_of_msg|>")
    assert 'tool="f"' in trained
    assert "Hello" not in trained
    assert "role=" not in trained
    assert "{broken" not in trained
