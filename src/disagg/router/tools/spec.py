"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat request as typed values."""

import enum
import json
from collections.abc import Mapping
from typing import Final, cast

import msgspec

from disagg.core.errors import InvalidRequest
from disagg.modelfiles.grammar import schema_text
from disagg.router.fields import Fields, JsonObject, wrong_type

MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 256 << 10  # of all their parameters together: each is checked
_NO_PARAMETERS: Final[Mapping[str, object]] = {"type": "object", "properties": {}}


class ToolMode(enum.StrEnum):
    """Who decides whether a function is called."""

    NONE = "none"  # nobody: tools are not even shown to the model
    AUTO = "auto"  # the model
    REQUIRED = "required"  # the client: one or more of them
    NAMED = "function"  # the client: this one


class Tool(msgspec.Struct, frozen=True):
    """A function that may be called."""

    name: str
    text: str  # the whole tool as the client gave it, as JSON
    schema: str  # of its arguments, as a grammar takes it
    is_strict: bool = False  # its arguments follow the schema, whoever decided to call it


class ToolUse(msgspec.Struct, frozen=True):
    """What a request says of tools."""

    tools: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.NONE
    named: str | None = None  # with NAMED
    is_parallel: bool = True  # several calls in one answer

    @property
    def shown(self) -> tuple[Tool, ...]:
        """Tools that the model is told of, and whose calls are looked for in its answer."""
        return () if self.mode is ToolMode.NONE else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Tools that an enforced call may be of."""
        return tuple(tool for tool in self.shown if self.named in (None, tool.name))

    @property
    def is_enforced(self) -> bool:
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)

    @property
    def is_enforced_once_begun(self) -> bool:
        """The model decides whether it calls, but a call that it begins is enforced."""
        return self.mode is ToolMode.AUTO and any(tool.is_strict for tool in self.tools)


def read_tool_use(fields: Fields) -> ToolUse:
    """Raises InvalidRequest naming the field that is wrong."""
    values = fields.array("tools") or []
    if len(values) > MAX_TOOLS:
        raise InvalidRequest(f"'tools' has {len(values)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    tools = tuple(_read_tool(f"tools[{place}]", value) for place, value in enumerate(values))
    size = sum(len(tool.schema.encode()) for tool in tools)
    if size > MAX_TOOLS_BYTES:
        text = f"'tools' have {size} bytes of parameters; at most {MAX_TOOLS_BYTES} are allowed"
        raise InvalidRequest(text, param="tools")
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"'tools' has two functions named {twice!r}; give each its own name", param="tools")
    is_parallel = fields.boolean("parallel_tool_calls", default=True)
    mode, named = _read_choice(fields, names)
    return ToolUse(tools, mode, named, is_parallel)


def _read_tool(name: str, value: object) -> Tool:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    fields = Fields(cast(JsonObject, value), f"{name}.")
    kind = fields.text("type")
    if kind != "function":
        text = f"'{name}.type' is {kind!r}; only 'function' is supported"
        raise InvalidRequest(text, param=f"{name}.type", code="unsupported_parameter")
    fields.required("function")
    function = fields.nested("function")
    assert function is not None  # required() saw it
    called = function.identifier("name")
    if function.has("description"):
        function.text("description")
    parameters = function.nested("parameters")
    is_strict = function.boolean("strict")
    schema = schema_text(parameters.values if parameters else _NO_PARAMETERS, is_lenient=not is_strict)
    return Tool(called, json.dumps(value, ensure_ascii=False), schema, is_strict)


def _read_choice(fields: Fields, names: list[str]) -> tuple[ToolMode, str | None]:
    value = fields.values.get("tool_choice")
    if value is None:
        return (ToolMode.AUTO if names else ToolMode.NONE), None
    if isinstance(value, str):
        if value not in (ToolMode.NONE, ToolMode.AUTO, ToolMode.REQUIRED):
            text = (
                f"'tool_choice' is {value[:40]!r}; it must be none, auto, required or an object that names a function"
            )
            raise InvalidRequest(text, param="tool_choice")
        mode = ToolMode(value)
        if mode is ToolMode.REQUIRED and not names:
            raise InvalidRequest("'tool_choice' is 'required', but there are no 'tools'", param="tool_choice")
        return (mode if names else ToolMode.NONE), None
    if not isinstance(value, dict):
        raise wrong_type("tool_choice", "a string or an object", value)
    choice = Fields(cast(JsonObject, value), "tool_choice.")
    kind = choice.text("type")
    if kind != "function":
        text = f"'tool_choice.type' is {kind!r}; only 'function' is supported"
        raise InvalidRequest(text, param="tool_choice", code="unsupported_parameter")
    choice.required("function")
    function = choice.nested("function")
    assert function is not None  # required() saw it
    named = function.text("name")
    if named not in names:
        raise InvalidRequest(f"'tool_choice' names {named[:80]!r}, which is not among 'tools'", param="tool_choice")
    return ToolMode.NAMED, named
