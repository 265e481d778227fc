"""A conversation as the pieces of text that K3 was trained on.

Order: tools, thinking effort, the messages, tool choice, response format, and the opening of the assistant's turn.
Source: the released chat encoder's published cases and the Kimi K3 report, appendix F.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3model.xtml import (
    END_OF_MESSAGE,
    Argument,
    Segment,
    arguments_of_mapping,
    arguments_of_text,
    close_tag,
    compact_json,
    control,
    open_tag,
    plain,
)

# The levels the model was trained on; everything that names or checks levels is made from this.
THINKING_EFFORTS = ("low", "high", "max")
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"

_IMAGE_PARTS = ("image", "image_url")
_TOOL_CHOICES = (None, "auto", "none", "required")
_RESPONSE_FORMATS = (None, "text", "json_object", "json_schema")

Message = Mapping[str, Any]


def segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: str | Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[tuple[str, bool]]:
    """The pieces of a conversation as ``(text, is control token)``.

    See ``render`` for the arguments and what raises.
    """
    rendered = render(
        messages,
        tools=tools,
        thinking=thinking,
        thinking_effort=thinking_effort,
        tool_choice=tool_choice,
        response_format=response_format,
        add_generation_prompt=add_generation_prompt,
    )
    return [(segment.text, segment.is_control) for segment in rendered]


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: str | Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    image_prompts: Sequence[str] | None = None,
) -> list[Segment]:
    """The pieces of a conversation, each marked as control or text and as trained or not.

    Args:
        messages: ``role`` user, system, assistant or tool; ``content`` text or parts; an assistant message may have
            ``reasoning_content`` and ``tool_calls``, a system message ``tools`` that are declared at that point.
        tools: declarations that stand before everything else.
        thinking: every assistant turn has a think channel, even an empty one; without it, none has.
        thinking_effort: one of ``THINKING_EFFORTS``; written only with ``thinking``.
        tool_choice: ``required`` and ``none`` are written, ``auto`` says nothing.
        response_format: ``json_object``, ``json_schema`` (an object with the schema) or ``text``.
        add_generation_prompt: open the assistant's next turn.
        image_prompts: the prompt of every image in order; without it a placeholder text stands for each.

    Raises:
        ValueError: an unknown level, role, choice or format; a tool result without a tool; a number of images that
            is not the number of prompts.
    """
    _check_options(thinking_effort, tool_choice)
    images = _ImagePrompts(image_prompts)
    rendered: list[Segment] = []
    if tools:
        rendered += _system_message("tool-declare", _tool_declaration(tools))
    if thinking and thinking_effort is not None:
        rendered += _system_message("thinking-effort", _effort_text(thinking_effort))
    rendered += _Conversation(images, thinking).render(_in_call_order(messages))
    if tool_choice in ("required", "none"):
        wanted = "MUST call tools" if tool_choice == "required" else "MUST NOT call any tools"
        rendered += _system_message(
            "tool-choice",
            f"The system is invoked with `tool_choice={tool_choice}`.\nYou {wanted} in the next message.",
        )
    if (body := _response_format_text(response_format)) is not None:
        rendered += _system_message("response-format", body)
    if add_generation_prompt:
        rendered += open_tag("message", [("role", "assistant")])
        rendered += open_tag("think" if thinking else "response")
    images.check_all_used()
    return rendered


def _check_options(thinking_effort: str | None, tool_choice: str | None) -> None:
    if thinking_effort is not None and thinking_effort not in THINKING_EFFORTS:
        raise ValueError(f"thinking_effort must be one of {', '.join(THINKING_EFFORTS)}; got {thinking_effort!r}")
    if tool_choice not in _TOOL_CHOICES:
        raise ValueError(f"tool_choice must be one of auto, none, required; got {tool_choice!r}")


def _effort_text(thinking_effort: str) -> str:
    *first, last = (f"`{effort}`" for effort in THINKING_EFFORTS)
    return (
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
        f"supported values include {', '.join(first)}, and {last}.\n"
        f"Now the system is invoked with `thinking_effort={thinking_effort}`."
    )


def _tool_declaration(tools: Sequence[Mapping[str, Any]]) -> str:
    return (
        f"# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{compact_json(list(tools))}\n```"
    )


def _tool_extension(tools: Sequence[Mapping[str, Any]]) -> str:
    return (
        "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
        f"```json\n{compact_json(list(tools))}\n```"
    )


def _response_format_text(response_format: str | Mapping[str, Any] | None) -> str | None:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if kind not in _RESPONSE_FORMATS:
        raise ValueError(f"response_format must be one of text, json_object, json_schema; got {kind!r}")
    if kind in (None, "text"):
        return None
    body = (
        f"The system is invoked with `response_format={kind}`.\nYour response must be raw JSON data without markdown "
        "code blocks (```json) or any additional formatting."
    )
    if kind == "json_object":
        return body
    declared = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    if declared is None:
        raise ValueError("response_format json_schema needs an object with json_schema in it")
    schema = (
        declared.get("schema", declared.get("json_schema", declared)) if isinstance(declared, Mapping) else declared
    )
    return f"{body}\nThe JSON data must match the following schema:\n```json\n{compact_json(schema)}\n```"


def _system_message(message_type: str, body: str) -> Iterator[Segment]:
    yield from open_tag("message", [("role", "system"), ("type", message_type)])
    yield from plain(body)
    yield from _end_of_message()


def _end_of_message() -> Iterator[Segment]:
    yield from close_tag("message")
    yield from control(END_OF_MESSAGE)


class _ImagePrompts:
    """Hands out the prompts of the images in order, and knows at the end whether all were used."""

    def __init__(self, prompts: Sequence[str] | None) -> None:
        self.prompts = prompts
        self.num_used = 0

    def take(self) -> Iterator[Segment]:
        """The next image's prompt."""
        self.num_used += 1
        if self.prompts is None:
            yield from control(IMAGE_PLACEHOLDER)
        elif self.num_used <= len(self.prompts):
            yield from control(self.prompts[self.num_used - 1])

    def text(self, text: str) -> Iterator[Segment]:
        """Text in which a placeholder stands for an image, where there are prompts to put in its place."""
        pieces = [text] if self.prompts is None else text.split(IMAGE_PLACEHOLDER)
        for number, piece in enumerate(pieces):
            if number:
                yield from self.take()
            yield from plain(piece)

    def check_all_used(self) -> None:
        """Refuse a conversation with more or fewer images than prompts."""
        if self.prompts is not None and self.num_used != len(self.prompts):
            raise ValueError(f"the conversation has {self.num_used} images, but {len(self.prompts)} prompts were given")


@dataclass
class _Conversation:
    """Renders messages one after the other; tool results refer back to the calls of the assistant before them."""

    images: _ImagePrompts
    thinking: bool
    calls: Sequence[Message] = ()
    num_results: int = 0
    rendered: list[Segment] = field(default_factory=list)

    def render(self, messages: Sequence[Message]) -> list[Segment]:
        """All messages."""
        for number, message in enumerate(messages):
            role = message.get("role")
            if role == "assistant":
                self._assistant(message)
            elif role == "tool":
                self._tool_result(message)
            elif role == "system" and message.get("tools"):
                self.rendered += _system_message("tool-declare", _tool_extension(message["tools"]))
            elif role in ("user", "system"):
                self.rendered += open_tag("message", _named(role, message))
                self.rendered += self._content(message.get("content"))
                self.rendered += _end_of_message()
            else:
                raise ValueError(f"message {number} has role {role!r}; roles are user, system, assistant and tool")
        return self.rendered

    def _assistant(self, message: Message) -> None:
        self.calls = message.get("tool_calls") or ()
        self.num_results = 0
        self.rendered += open_tag("message", _named("assistant", message))
        self.rendered += self._channels(message)
        self.rendered += _trained(_end_of_message())

    def _channels(self, message: Message) -> Iterator[Segment]:
        yield from _trained(self._spoken(message))
        if self.calls:
            yield from _trained(open_tag("tools"))
            for index, call in enumerate(self.calls, start=1):
                yield from self._call(index, call)
            yield from _trained(close_tag("tools"))

    def _spoken(self, message: Message) -> Iterator[Segment]:
        if self.thinking:
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            yield from open_tag("think")
            if reasoning.strip():
                yield from self.images.text(reasoning)
            yield from close_tag("think")
        yield from open_tag("response")
        yield from self._content(message.get("content"))
        yield from close_tag("response")

    def _call(self, index: int, call: Message) -> Iterator[Segment]:
        function = call.get("function", call)
        yield from _trained(open_tag("call", [("tool", function["name"]), ("index", index)]))
        arguments = _arguments(function.get("arguments"))
        if isinstance(arguments, str):
            # Only an input holds such a block, the model never writes one, so it is not trained.
            yield from open_tag("json", [("type", "object")])
            yield from self.images.text(arguments)
            yield from close_tag("json")
        else:
            for argument in arguments:
                yield from _trained(open_tag("argument", [("key", argument.key), ("type", argument.type)]))
                yield from _trained(self.images.text(argument.text))
                yield from _trained(close_tag("argument"))
        yield from _trained(close_tag("call"))

    def _tool_result(self, message: Message) -> None:
        self.num_results += 1
        name = message.get("tool", message.get("name"))
        if name is None and self.num_results <= len(self.calls):
            call = self.calls[self.num_results - 1]
            name = call.get("function", call)["name"]
        if name is None:
            raise ValueError(
                f"tool result {self.num_results} names no tool and answers no call of the assistant before it"
            )
        self.rendered += open_tag("message", [("role", "tool"), ("tool", name), ("index", self.num_results)])
        self.rendered += self._content(message.get("content"))
        self.rendered += _end_of_message()

    def _content(self, content: str | Sequence[Mapping[str, Any]] | None) -> Iterator[Segment]:
        if content is None:
            return
        if isinstance(content, str):
            yield from self.images.text(content)
            return
        for part in content:
            if part["type"] in _IMAGE_PARTS:
                yield from self.images.take()
            else:
                yield from self.images.text(part["text"])


def _trained(pieces: Iterator[Segment]) -> Iterator[Segment]:
    return (piece._replace(is_trained=True) for piece in pieces)


def _named(role: str, message: Message) -> list[tuple[str, object]]:
    attributes: list[tuple[str, object]] = [("role", role)]
    if message.get("name"):
        attributes.append(("name", message["name"]))
    return attributes


def _arguments(arguments: Mapping[str, Any] | str | None) -> list[Argument] | str:
    """The arguments one by one, or the text itself where it is no JSON."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return []
    if isinstance(arguments, Mapping):
        return arguments_of_mapping(arguments)
    parsed = arguments_of_text(arguments)
    return arguments if parsed is None else parsed


def _in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Every run of tool results in the order of the calls they answer, named after those calls.

    A run with a result that answers no call by its id stays as it is.
    """
    ordered: list[Message] = []
    run: list[Message] = []
    calls: dict[str, tuple[int, str]] = {}
    for message in messages:
        if message.get("role") == "tool":
            run.append(message)
            continue
        ordered += _sorted_run(run, calls)
        run = []
        ordered.append(message)
        if message.get("role") == "assistant":
            calls = _calls_by_id(message.get("tool_calls") or ())
    return ordered + _sorted_run(run, calls)


def _calls_by_id(calls: Sequence[Message]) -> dict[str, tuple[int, str]]:
    by_id: dict[str, tuple[int, str]] = {}
    for position, call in enumerate(calls):
        if call.get("id") is not None:
            by_id.setdefault(str(call["id"]), (position, call.get("function", call)["name"]))
    return by_id


def _sorted_run(run: list[Message], calls: Mapping[str, tuple[int, str]]) -> list[Message]:
    answered = [calls.get(str(result.get("tool_call_id", result.get("id")))) for result in run]
    matched = [(*call, result) for call, result in zip(answered, run, strict=True) if call is not None]
    if len(matched) != len(run):
        return run
    matched.sort(key=lambda item: item[0])
    return [{**result, "tool": name} for _, name, result in matched]
