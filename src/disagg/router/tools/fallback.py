"""Tools for models whose chat template knows none: everything about them is spelled out in ordinary turns."""

import json
from collections.abc import Collection

import msgspec

from disagg.modelfiles.chat_template import ChatMessage, MadeCall
from disagg.router.tools.families import tool_prompt
from disagg.router.tools.parsers import HERMES_CLOSE, HERMES_OPEN
from disagg.router.tools.spec import Tool


def spelled_out(messages: tuple[ChatMessage, ...], tools: Collection[Tool]) -> tuple[ChatMessage, ...]:
    """The same conversation with roles system, user and assistant only."""
    turns = tuple(_plain(message) for message in messages)
    if not tools:
        return turns
    prompt = tool_prompt(tools)
    first = turns[0]
    if first.role == "system":
        return (msgspec.structs.replace(first, content=f"{first.content}\n\n{prompt}"), *turns[1:])
    return (ChatMessage("system", prompt), *turns)


def _plain(message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        return ChatMessage("user", f"<tool_response>\n{message.content}\n</tool_response>", message.name)
    if message.calls:
        parts = [message.content] if message.content else []
        parts += [_call_text(call) for call in message.calls]
        return msgspec.structs.replace(message, content="\n".join(parts), calls=())
    return message


def _call_text(call: MadeCall) -> str:
    return f'{HERMES_OPEN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n{HERMES_CLOSE}'
