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
    shape = _SHAPES[family]
    names = [f"call_{place}" for place in range(len(tools))]
    more = f" ({_quoted(shape.between)} call){{0,{MAX_ENFORCED_CALLS - 1}}}" if is_parallel else ""
    rules = [f"calls: call{more}", f"call: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        opening = _quoted(f"{shape.start}{tool.name}{shape.middle}")
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
