"""How model families write calls: which parser reads them, which rules enforce them, which words ask for them."""

import json
from collections.abc import Collection
from typing import Final

import msgspec

from disagg.router.parser_names import ToolParser
from disagg.router.tools.parsers import HERMES_CLOSE, HERMES_OPEN, PYTHON_TAG, CallParser, HermesParser, Llama3Parser
from disagg.router.tools.spec import Tool

MAX_ENFORCED_CALLS: Final = 16  # in one answer; a model that would not stop by itself is stopped there


class Shape(msgspec.Struct, frozen=True):
    """A call's text around its name and its arguments, and what stands between two calls."""

    start: str
    middle: str
    end: str
    between: str


_SHAPES: Final = {
    ToolParser.HERMES: Shape(f'{HERMES_OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{HERMES_CLOSE}", "\n"),
    ToolParser.LLAMA3: Shape('{"name": "', '", "parameters": ', "}", "; "),
}
# An answer that the model begins with a thought is the thought's: its rules, not these, say what may come in it.
_FIRST_TEXT: Final = r"FIRST_TEXT: TEXT & ~/\s*<think>(.|\n)*/"
_ANY_TEXT: Final = r"TEXT: /(.|\n)*/"
# What Llama's parser takes for the beginning of a call, and text that it takes for none.
_LLAMA3_TEXT: Final = r"""OPENING: /\s*<\|python_tag\|>\s*|\s+/
TEXT: /(.|\n)*/ & ~/\s*(<\|python_tag\|>\s*)?\{(.|\n)*/"""


def choose_parser(asked: ToolParser, template: str | None) -> ToolParser:
    """The family, never AUTO: by its chat template where it is not given."""
    if asked is not ToolParser.AUTO:
        return asked
    template = template or ""
    is_llama = PYTHON_TAG in template or ('"parameters"' in template and "<|start_header_id|>" in template)
    return ToolParser.LLAMA3 if is_llama and HERMES_OPEN not in template else ToolParser.HERMES


def start_parser(family: ToolParser, names: Collection[str]) -> CallParser:
    """A fresh parser for one answer. family: HERMES or LLAMA3."""
    return Llama3Parser(names) if family is ToolParser.LLAMA3 else HermesParser(names)


def call_rules(family: ToolParser, tools: Collection[Tool], *, is_parallel: bool) -> str:
    """Rules of a grammar for one or more calls of these tools; the rule to begin with is `calls`."""
    between = _quoted(_SHAPES[family].between)
    more = f" ({between} call){{0,{MAX_ENFORCED_CALLS - 1}}}" if is_parallel else ""
    return f"calls: call{more}\n{_one_call(family, tools)}"


def chosen_call_rules(family: ToolParser, tools: Collection[Tool], *, is_parallel: bool, may_think: bool) -> str:
    """Rules for an answer that may call these tools: its text is free, a call that it begins is enforced.

    The rule to begin with is `body`; where the answer may_think before it, there is also `first`: the same for an
    answer that does not.
    """
    if family is ToolParser.LLAMA3:
        rules = [_LLAMA3_TEXT, call_rules(family, tools, is_parallel=is_parallel)]
    else:
        rules = [_ANY_TEXT, _one_call(family, tools, begun=HERMES_OPEN)]
    rules.append(_body("body", "TEXT", family, is_parallel=is_parallel))
    if may_think:
        rules += [_FIRST_TEXT, _body("first", "FIRST_TEXT", family, is_parallel=is_parallel)]
    return "\n".join(rules)


def _body(name: str, text: str, family: ToolParser, *, is_parallel: bool) -> str:
    if family is ToolParser.LLAMA3:
        return f"{name}: OPENING? calls | {text}"
    more = " body" if is_parallel else ""
    return f"{name}: {name}_said call{more} | {text}\n{name}_said[lazy]: {text} {_quoted(HERMES_OPEN)}"


def _one_call(family: ToolParser, tools: Collection[Tool], begun: str = "") -> str:
    """The rule `call`; what stands in `begun` of its text has been read by another."""
    shape = _SHAPES[family]
    names = [f"call_{place}" for place in range(len(tools))]
    rules = [f"call: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        opening = _quoted(f"{shape.start.removeprefix(begun)}{tool.name}{shape.middle}")
        rules.append(f"{name}: {opening} {name}_arguments {_quoted(shape.end)}")
        rules.append(f"{name}_arguments: %json {tool.schema}")
    return "\n".join(rules)


def tool_prompt(tools: Collection[Tool]) -> str:
    """What tells a model of its tools where its chat template cannot; its calls are then HERMES's."""
    listed = "\n".join(tool.text for tool in tools)
    call = f'{HERMES_OPEN}\n{{"name": "<function>", "arguments": {{"<parameter>": "<value>"}}}}\n{HERMES_CLOSE}'
    return (
        "You can call functions. They are described here, one JSON object a line:\n"
        f"{listed}\n"
        "To call one, write exactly this, with its name and arguments filled in, and nothing else:\n"
        f"{call}"
    )


def _quoted(text: str) -> str:
    return json.dumps(text)
