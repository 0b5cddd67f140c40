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


def first_stray(messages: Sequence[ChatMessage]) -> int | None:
    """The place of the first tool's message that does not follow, perhaps after other answers, the turn of its call."""
    made: frozenset[str] = frozenset()  # calls of the last turn that was no tool's
    for place, message in enumerate(messages):
        if message.call_id is None:
            made = frozenset(call.id for call in message.calls)
        elif message.call_id not in made:
            return place
    return None


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
