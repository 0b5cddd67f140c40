"""Calls read out of texts: what is a call, what is plain content, what is dropped; however the text is cut."""

import json
import random
from collections.abc import Iterator

import pytest

from disagg.core.request import FinishReason
from disagg.router.message_reader import MessageReader, MessageReading
from disagg.router.parser_names import ReasoningParser, ToolParser
from disagg.router.reasoning import choose_reasoning, has_opened
from disagg.router.tools.families import choose_parser
from disagg.router.tools.spec import ToolMode

NAMES = ("get", "put")
Message = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, calls


def reading(parser: ToolParser, **more: object) -> MessageReading:
    fields = {"mode": ToolMode.AUTO, "is_parallel": True, "is_thinking": False, "is_open": False, **more}
    return MessageReading(parser, NAMES, **fields)  # type: ignore[arg-type]


def read(how: MessageReading, pieces: list[str]) -> Message:
    reader = MessageReader(how)
    deltas = [reader.push(piece) for piece in pieces] + [reader.flush()]
    calls: dict[int, list[str]] = {}
    for delta in (call for each in deltas for call in each.calls):
        if delta.name is not None:
            assert delta.index not in calls
            calls[delta.index] = [delta.name, ""]
        calls[delta.index][1] += delta.arguments
    assert list(calls) == list(range(len(calls)))
    found = [(name, arguments) for name, arguments in calls.values()]
    return "".join(each.content for each in deltas), "".join(each.reasoning for each in deltas), found


def cuts(text: str) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    for seed in range(20):
        chance = random.Random(seed)
        places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 6))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


HERMES: dict[str, Message] = {
    "": ("", "", []),
    "plain  text \n": ("plain  text \n", "", []),
    "a < b <tool_": ("a < b <tool_", "", []),
    '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>': ("", "", [("get", '{"a": 1}')]),
    'Let me see.\n\n<tool_call>{"name":"get","arguments":{}}</tool_call>\n': ("Let me see.", "", [("get", "{}")]),
    '<tool_call>{"arguments": {"x": [1, "}"]}, "name": "put"}</tool_call>': ("", "", [("put", '{"x": [1, "}"]}')]),
    '<tool_call>{"name": "get"}</tool_call>': ("", "", [("get", "{}")]),
    '<tool_call>{"name": "get", "arguments": null}</tool_call>': ("", "", [("get", "{}")]),
    '<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>': ("", "", [("get", '{"a": 1}')]),
    '<tool_call>{"id": 7, "name": "get", "arguments": {"q": "\\"<tool_call>"}}</tool_call>': (
        "",
        "",
        [("get", '{"q": "\\"<tool_call>"}')],
    ),
    '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "put", "arguments": {}}'
    "\n</tool_call> done": (" done", "", [("get", "{}"), ("put", "{}")]),
    # An end that never came: the call is whole all the same; or cut short, as its text was.
    '<tool_call>{"name": "get", "arguments": {"a": 1}}': ("", "", [("get", '{"a": 1}')]),
    '<tool_call>{"name": "get", "arguments": {"a": ': ("", "", [("get", '{"a": ')]),
    '<tool_call>{"name": "get", "argum': ('<tool_call>{"name": "get", "argum', "", []),
    # No calls: all of it is content.
    "x <tool_call>nonsense</tool_call>": ("x <tool_call>nonsense</tool_call>", "", []),
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>': (
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "",
        [],
    ),
    '<tool_call>{"name": "get", "arguments": [1]}</tool_call>': (
        '<tool_call>{"name": "get", "arguments": [1]}</tool_call>',
        "",
        [],
    ),
    '<tool_call>{"name": 5}</tool_call> <tool_call>{"name": "put"}</tool_call>': (
        '<tool_call>{"name": 5}</tool_call>',
        "",
        [("put", "{}")],
    ),
    # Broken after it was a call: what follows is content.
    '<tool_call>{"name": "get", "arguments": {} oops}</tool_call>': ("oops}</tool_call>", "", [("get", "{}")]),
}

LLAMA3: dict[str, Message] = {
    "Hello {x}": ("Hello {x}", "", []),
    '{"name": "get", "parameters": {"a": "é"}}': ("", "", [("get", '{"a": "é"}')]),
    ' <|python_tag|>{"name": "get", "parameters": {}}': ("", "", [("get", "{}")]),
    '{"name": "get", "parameters": {}}; {"name": "put", "arguments": {"b": 2}}\n': (
        "",
        "",
        [("get", "{}"), ("put", '{"b": 2}')],
    ),
    '{"answer": 42}': ('{"answer": 42}', "", []),
    '{"name": "Bob", "parameters": {}}': ('{"name": "Bob", "parameters": {}}', "", []),
    '{"name": "get", "parameters": {}} and more': (" and more", "", [("get", "{}")]),
    "<|python": ("<|python", "", []),
    "  ": ("  ", "", []),
}


@pytest.mark.parametrize("text", HERMES)
def test_hermes(text: str) -> None:
    for pieces in cuts(text):
        assert read(reading(ToolParser.HERMES), pieces) == HERMES[text], pieces


@pytest.mark.parametrize("text", LLAMA3)
def test_llama3(text: str) -> None:
    for pieces in cuts(text):
        assert read(reading(ToolParser.LLAMA3), pieces) == LLAMA3[text], pieces


CALL = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
THINKING: dict[tuple[str, bool], Message] = {
    ("<think>\nhm <b>\n</think>\n\nYes.", False): ("Yes.", "hm <b>", []),
    (" \n<think></think>Yes.", False): ("Yes.", "", []),
    ("No thought. <think>x</think>", False): ("No thought. <think>x</think>", "", []),
    ("still at it </thi", False): ("still at it </thi", "", []),
    ("<think>still at it </thi", False): ("", "still at it </thi", []),
    ("\nhm\n</think>Yes.</think>", True): ("Yes.</think>", "hm", []),
    ("never ends \n", True): ("", "never ends", []),
    ("a\n\nb</think>" + CALL, True): ("", "a\n\nb", [("get", "{}")]),
    ("think of " + CALL + "</think>no", True): ("no", "think of " + CALL, []),
}


@pytest.mark.parametrize(("text", "is_open"), THINKING)
def test_thoughts(text: str, is_open: bool) -> None:
    how = reading(ToolParser.HERMES, is_thinking=True, is_open=is_open)
    for pieces in cuts(text):
        assert read(how, pieces) == THINKING[text, is_open], pieces


def test_arguments_come_as_they_are_written() -> None:
    reader = MessageReader(reading(ToolParser.HERMES))
    assert reader.push('<tool_call>{"name": "get", "arguments": ').is_empty
    (first,) = reader.push('{"city": "Pr').calls
    assert (first.name, first.arguments) == ("get", '{"city": "Pr')
    (second,) = reader.push("aha").calls
    assert (second.name, second.arguments) == (None, "aha")


@pytest.mark.parametrize(
    ("mode", "text", "reason", "expected"),
    [
        (ToolMode.AUTO, CALL, FinishReason.STOP, FinishReason.TOOL_CALLS),
        (ToolMode.REQUIRED, CALL, FinishReason.STOP, FinishReason.TOOL_CALLS),
        (ToolMode.NAMED, CALL, FinishReason.STOP, FinishReason.STOP),
        (ToolMode.AUTO, CALL, FinishReason.LENGTH, FinishReason.LENGTH),
        (ToolMode.AUTO, "no", FinishReason.STOP, FinishReason.STOP),
    ],
)
def test_why_it_finished(mode: ToolMode, text: str, reason: FinishReason, expected: FinishReason) -> None:
    reader = MessageReader(reading(ToolParser.HERMES, mode=mode))
    reader.push(text)
    reader.flush()
    assert reader.finish_reason(reason) is expected


def test_one_call_at_a_time() -> None:
    content, _, calls = read(reading(ToolParser.HERMES, is_parallel=False), [CALL + CALL.replace("get", "put")])
    assert (content, calls) == ("", [("get", "{}")])


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (None, ToolParser.HERMES),
        ("{{ tools }} <tool_call>", ToolParser.HERMES),
        ("{{ tools }} <|python_tag|>", ToolParser.LLAMA3),
        ('{{ tools }} <|start_header_id|> {"name": "f", "parameters": {}}', ToolParser.LLAMA3),
    ],
)
def test_the_template_tells_the_family(template: str | None, parser: ToolParser) -> None:
    assert choose_parser(ToolParser.AUTO, template) is parser
    assert choose_parser(ToolParser.NONE, template) is ToolParser.NONE


def test_the_template_tells_whether_it_thinks() -> None:
    assert choose_reasoning(ReasoningParser.AUTO, "x</think>y") is ReasoningParser.THINK
    assert choose_reasoning(ReasoningParser.AUTO, "xy") is ReasoningParser.NONE
    assert choose_reasoning(ReasoningParser.THINK, None) is ReasoningParser.THINK
    assert has_opened("<|assistant|><think>\n")
    assert not has_opened("<|assistant|><think>\n\n</think>\n")


def test_long_arguments_take_time_in_proportion() -> None:
    arguments = json.dumps({"text": "x" * 200_000})
    text = f'<tool_call>{{"name": "get", "arguments": {arguments}}}</tool_call>'
    pieces = [text[start : start + 50] for start in range(0, len(text), 50)]
    assert read(reading(ToolParser.HERMES), pieces) == ("", "", [("get", arguments)])
