"""Tools in a conversation so far: calls that the assistant made, and what came of them."""

from collections.abc import Sequence
from typing import Final, cast

from disagg.core.errors import InvalidRequest
from disagg.modelfiles.chat_template import ChatMessage, MadeCall
from disagg.router.fields import Fields, JsonObject, wrong_type

MAX_CALLS: Final = 128  # of one message


def read_calls(fields: Fields) -> tuple[MadeCall, ...]:
    """`tool_calls` of an assistant's message. Raises InvalidRequest."""
    values = fields.array("tool_calls") or []
    name = fields.name("tool_calls")
    if len(values) > MAX_CALLS:
        raise InvalidRequest(f"'{name}' has {len(values)} calls; at most {MAX_CALLS} are allowed", param=name)
    return tuple(_read_call(f"{name}[{place}]", value) for place, value in enumerate(values))


def read_call_id(fields: Fields) -> str:
    """`tool_call_id` of a tool's message. Raises InvalidRequest."""
    return fields.text("tool_call_id")


def is_answer_to_call(messages: Sequence[ChatMessage], place: int) -> bool:
    """Whether the tool's message at `place` follows, perhaps after other answers, the turn that made its call."""
    first = place
    while first > 0 and messages[first].call_id is not None:
        first -= 1
    return any(call.id == messages[place].call_id for call in messages[first].calls)


def _read_call(name: str, value: object) -> MadeCall:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    fields = Fields(cast(JsonObject, value), f"{name}.")
    if fields.has("type") and fields.text("type") != "function":
        text = f"'{name}.type' is {fields.text('type')[:40]!r}; only 'function' is supported"
        raise InvalidRequest(text, param=f"{name}.type", code="unsupported_parameter")
    fields.required("function")
    function = fields.nested("function")
    assert function is not None  # required() saw it
    arguments = function.text("arguments") if function.has("arguments") else "{}"
    return MadeCall(fields.text("id") if fields.has("id") else "", function.text("name"), arguments)
