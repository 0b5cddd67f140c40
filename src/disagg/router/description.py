"""The OpenAPI description of this server's own API, at /openapi.json.

One row for each parameter, with the JSON schema of what is taken; a test compares the rows with docs/api.md. Schemas of
answers are made from the types that are sent.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from disagg import __version__
from disagg.router.chat import ChatAnswer
from disagg.router.completions import CompletionAnswer
from disagg.router.fields import IDENTIFIER
from disagg.router.http_errors import JSON, ErrorEnvelope
from disagg.router.message_format import MessageAnswer
from disagg.router.openai_types import (
    INT64,
    MAX_BIASED_TOKENS,
    MAX_CHAT_LOGPROBS,
    MAX_CHOICES,
    MAX_COMPLETION_LOGPROBS,
    MAX_PENALTY,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOKENS,
    REPETITION_PENALTY,
    ROLES,
)
from disagg.router.timelines import DEFAULT_LAST, MAX_LAST
from disagg.router.tokens import DetokenizeAnswer, TokenizeAnswer
from disagg.router.tools.spec import MAX_TOOLS
from disagg.telemetry.timeline import TimelineAnswer

Schema = dict[str, Any]
_REF: Final = "#/components/schemas/{name}"


class Endpoint(enum.StrEnum):
    """A path that takes a body."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"


WRITING: Final = (Endpoint.CHAT, Endpoint.COMPLETIONS)


class Parameter(msgspec.Struct, frozen=True):
    """A field of a body. Null is as good as left out, unless it is required."""

    name: str
    schema: Schema
    endpoints: tuple[Endpoint, ...] = WRITING
    is_required: bool = False

    @property
    def taken(self) -> Schema:
        return self.schema if self.is_required else {"anyOf": [self.schema, {"type": "null"}]}


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _array(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    bound = {} if high is None else {"maxItems": high}
    return {"type": "array", "items": items, "minItems": low, **bound}


def _object(required: Iterable[str] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _or_null(schema: Schema) -> Schema:
    return _either(schema, {"type": "null"})


_TEXT: Final[Schema] = {"type": "string"}
_TRUTH: Final[Schema] = {"type": "boolean"}
_TOKEN_IDS: Final = _array({"type": "integer"}, 1)
_STOP: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_PARTS: Final = _array(_object(("type", "text"), type={"const": "text"}, text=_TEXT), 1)
_CONTENT: Final = _either(_TEXT, _PARTS)
_MESSAGE: Final = _either(
    _object(
        ("role", "content"),
        role={"enum": [role for role in ROLES if role not in ("assistant", "tool")]},
        content=_CONTENT,
        name=_or_null(_TEXT),
    ),
    _object(
        ("role",),
        role={"const": "assistant"},
        content=_or_null(_CONTENT),
        name=_or_null(_TEXT),
        reasoning_content=_or_null(_TEXT),
        tool_calls=_or_null({"type": "array"}),
    ),
    _object(("role", "content", "tool_call_id"), role={"const": "tool"}, content=_CONTENT, tool_call_id=_TEXT),
)
_NAME: Final[Schema] = {"type": "string", "pattern": f"^{IDENTIFIER}$"}
_FUNCTION: Final = _object(
    ("name",),
    name=_NAME,
    description=_or_null(_TEXT),
    parameters=_or_null({"type": "object"}),
    strict=_or_null(_TRUTH),
)
_TOOL: Final = _object(("type", "function"), type={"const": "function"}, function=_FUNCTION)
_NAMED: Final = _object(("type", "function"), type={"const": "function"}, function=_object(("name",), name=_TEXT))
_DOCUMENT: Final = _object(
    ("name", "schema"),
    name=_NAME,
    schema={"type": "object"},
    description=_or_null(_TEXT),
    strict=_or_null(_TRUTH),
)
_FORMAT: Final = _either(
    _object(("type",), type={"const": "text"}),
    _object(("type",), type={"const": "json_object"}, schema=_or_null({"type": "object"})),
    _object(("type", "json_schema"), type={"const": "json_schema"}, json_schema=_DOCUMENT),
)
_BIASES: Final[Schema] = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": _or_null(_number(-100, 100)),
    "maxProperties": MAX_BIASED_TOKENS,
}
_OPTIONS: Final = _object(include_usage=_or_null(_TRUTH), continuous_usage_stats=_or_null(_TRUTH))
_CHAT: Final = (Endpoint.CHAT,)
_COMPLETIONS: Final = (Endpoint.COMPLETIONS,)
_SPELLING: Final = (Endpoint.TOKENIZE,)

PARAMETERS: Final = (
    Parameter("model", _TEXT, is_required=True),
    Parameter("messages", _array(_MESSAGE, 1), _CHAT, is_required=True),
    Parameter(
        "prompt",
        _either(_TEXT, _array(_TEXT, 1), _TOKEN_IDS, _array(_TOKEN_IDS, 1)),
        _COMPLETIONS,
        is_required=True,
    ),
    Parameter("max_tokens", _integer(1, MAX_TOKENS), _CHAT),
    Parameter("max_tokens", _integer(0, MAX_TOKENS), _COMPLETIONS),
    Parameter("max_completion_tokens", _integer(1, MAX_TOKENS), _CHAT),
    Parameter("max_completion_tokens", _integer(0, MAX_TOKENS), _COMPLETIONS),
    Parameter("min_tokens", _integer(0, MAX_TOKENS)),
    Parameter("n", _integer(1, MAX_CHOICES)),
    Parameter("temperature", _number(0, 2)),
    Parameter("top_p", _number(0, 1)),
    Parameter("top_k", _integer(-1, MAX_TOKENS)),
    Parameter("min_p", _number(0, 1)),
    Parameter("seed", _integer(*INT64)),
    Parameter("stop", _either(_STOP, _array(_STOP, 0, MAX_STOPS))),
    Parameter("stop_token_ids", _array({"type": "integer"}, 0, MAX_STOP_TOKENS)),
    Parameter("ignore_eos", _TRUTH),
    Parameter("presence_penalty", _number(-MAX_PENALTY, MAX_PENALTY)),
    Parameter("frequency_penalty", _number(-MAX_PENALTY, MAX_PENALTY)),
    Parameter("repetition_penalty", _number(*REPETITION_PENALTY)),
    Parameter("logit_bias", _BIASES),
    Parameter("logprobs", _TRUTH, _CHAT),
    Parameter("logprobs", _integer(0, MAX_COMPLETION_LOGPROBS), _COMPLETIONS),
    Parameter("top_logprobs", _integer(0, MAX_CHAT_LOGPROBS), _CHAT),
    Parameter("prompt_logprobs", _integer(0, MAX_PROMPT_LOGPROBS)),
    Parameter("echo", _TRUTH, _COMPLETIONS),
    Parameter("stream", _TRUTH),
    Parameter("stream_options", _OPTIONS),
    Parameter("user", _TEXT),
    Parameter("response_format", _FORMAT, _CHAT),
    Parameter("tools", _array(_TOOL, 0, MAX_TOOLS), _CHAT + _SPELLING),
    Parameter("tool_choice", _either({"enum": ["none", "auto", "required"]}, _NAMED), _CHAT + _SPELLING),
    Parameter("parallel_tool_calls", _TRUTH, _CHAT),
    Parameter("model", _TEXT, (Endpoint.TOKENIZE, Endpoint.DETOKENIZE)),
    Parameter("prompt", _TEXT, _SPELLING),
    Parameter("messages", _array(_MESSAGE, 1), _SPELLING),
    Parameter("add_special_tokens", _TRUTH, _SPELLING),
    Parameter("add_generation_prompt", _TRUTH, _SPELLING),
    Parameter("return_token_strs", _TRUTH, _SPELLING),
    Parameter("tokens", _TOKEN_IDS, (Endpoint.DETOKENIZE,), is_required=True),
)


def body_schema(endpoint: Endpoint) -> Schema:
    """What a body may be. Keys that are not named are allowed."""
    rows = [row for row in PARAMETERS if endpoint in row.endpoints]
    named = {row.name: row.taken for row in rows}
    schema = _object((row.name for row in rows if row.is_required), **named)
    if endpoint is Endpoint.TOKENIZE:
        schema["anyOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    return schema


def describe(endpoints: Iterable[tuple[str, str]], version: str) -> Schema:
    """The whole document. endpoints: (method, path) of all there are."""
    answers = (
        ChatAnswer,
        MessageAnswer,
        CompletionAnswer,
        TokenizeAnswer,
        DetokenizeAnswer,
        TimelineAnswer,
        ErrorEnvelope,
    )
    refs, components = msgspec.json.schema_components(answers, ref_template=_REF)
    chat, message, completion, spelled, text, timeline, error = refs
    bodies: Mapping[str, Schema] = {
        Endpoint.CHAT: _either(chat, message),
        Endpoint.COMPLETIONS: completion,
        Endpoint.TOKENIZE: spelled,
        Endpoint.DETOKENIZE: text,
        "/timeline": timeline,
        "/timeline/{request_id}": timeline,
    }
    paths: dict[str, Schema] = {}
    for method, path in endpoints:
        where = path.replace(":path}", "}")
        operation = _operation(where, bodies.get(path, {"type": "object"}), error)
        paths.setdefault(where, {})[method.lower()] = {"operationId": f"{method.lower()} {where}", **operation}
    info = {"title": "disagg", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _operation(path: str, answer: Schema, error: Schema) -> Schema:
    content = {"text/plain": {"schema": _TEXT}} if path == "/metrics" else {JSON: {"schema": answer}}
    if path in WRITING:
        content["text/event-stream"] = {"schema": _TEXT}
    operation: Schema = {
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": {"description": "an error", "content": {JSON: {"schema": error}}},
        },
    }
    if path in tuple(Endpoint):
        schema = body_schema(Endpoint(path))
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"\{(\w+)\}", path)
    ]
    if path == "/timeline":
        last = {**_integer(1, MAX_LAST), "default": DEFAULT_LAST}
        parameters.append({"name": "last", "in": "query", "required": False, "schema": last})
    if parameters:
        operation["parameters"] = parameters
    return operation


class Described:
    """The endpoint that answers with the document; it names itself too."""

    PATH: Final = "/openapi.json"

    def __init__(self, endpoints: Iterable[tuple[str, str]]) -> None:
        self._json = msgspec.json.encode(describe([*endpoints, ("GET", self.PATH)], __version__))

    async def answer(self, request: Request) -> Response:
        return Response(self._json, media_type=JSON)
