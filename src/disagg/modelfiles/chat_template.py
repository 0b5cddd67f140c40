"""A model's chat template: Jinja source in, prompt text out, in a sandbox that changes nothing."""

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from disagg.core.errors import InvalidRequest


class MadeCall(msgspec.Struct, frozen=True):
    """A function call that the assistant made in an earlier turn."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn. Parts of text have been joined."""

    role: str
    content: str
    name: str | None = None
    calls: tuple[MadeCall, ...] = ()  # of an assistant
    call_id: str | None = None  # of a tool: whose answer this is
    reasoning: str | None = None  # of an assistant: what it thought


class ChatTemplate:
    """Renders conversations for one model. Thread-safe after construction."""

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str],
        now: Callable[[], dt.datetime] = dt.datetime.now,
    ) -> None:
        """Take Jinja source; `named_tokens` are bos_token, eos_token, …; `now` is what strftime_now reads."""
        self.source = source
        self._named_tokens = dict(named_tokens)
        self._now = now

    @property
    def shows_tools(self) -> bool:
        """Whether it tells the model of tools."""
        return "tools" in self.source

    def render(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True, tools: Sequence[str] = ()
    ) -> str:
        """The prompt text; tools are JSON.

        Raises InvalidRequest with the template's own message when it refuses the messages.
        """
        turns = [_as_turn(message) for message in messages]
        try:
            return self._template.render(
                messages=turns,
                tools=[json.loads(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._named_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            # Templates are code: one that expects other fields fails with Python's own errors.
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {error!r}", param="messages"
            ) from error

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationMarks]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: self._now().strftime(form)
        return environment.from_string(self.source)


def _as_turn(message: ChatMessage) -> dict[str, object]:
    turn: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name is not None:
        turn["name"] = message.name
    if message.calls:
        turn["tool_calls"] = [_as_call(call) for call in message.calls]
    if message.call_id is not None:
        turn["tool_call_id"] = message.call_id
    if message.reasoning is not None:
        turn["reasoning_content"] = message.reasoning
    return turn


def _as_call(call: MadeCall) -> dict[str, object]:
    """Templates print arguments as JSON themselves; what is no JSON object stays the text it is."""
    arguments: object = call.arguments
    try:
        parsed = json.loads(call.arguments)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; a prompt must carry them as they are.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationMarks(Extension):
    """Accepts {% generation %} … {% endgeneration %}, which training code uses; the inside is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
