"""A worker killed in the middle of a document: what the client gets is valid, and equal to the undisturbed answer."""

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
from tests.e2e.cluster import Front
from tests.faults.strikes import WRITING, Act, strike_until_moved
from tests.faults.survival import MODEL, TIMEOUT_S, TRIGGER

from disagg.testing.processes import Serve

LENGTH = 16  # items: hundreds of tokens, most of them still to come when a worker is struck
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "minItems": LENGTH,
            "maxItems": LENGTH,
            "items": {
                "type": "object",
                "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}, "ok": {"type": "boolean"}},
                "required": ["id", "ok"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["items"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "store", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "store", "parameters": SCHEMA, "strict": True}}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "two choices": {"temperature": 0.9, "seed": 5, "n": 2},
    "a call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "seed": 8},
    "a chosen call": {"tools": [STRICT], "parallel_tool_calls": False, "seed": 8},
}
pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("mortals")]


@pytest.fixture
def serve(mortals: Serve) -> Serve:
    return mortals


@pytest.fixture
def front(mortals_front: Front) -> Front:
    return mortals_front


def question(front: Front, mode: str) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "write it"}], "max_tokens": 3000, **MODES[mode]}
    if "tools" not in body:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    if mode == "a chosen call":
        (trigger,) = front.post({"prompt": TRIGGER}, "/tokenize").json()["tokens"]
        # Pushed, or a model without training would never write it.
        body["logit_bias"] = {str(trigger): 100}
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def read(front: Front, body: dict[str, Any], after: int = -1, act: Callable[[], None] = lambda: None) -> Any:
    """(documents by choice, finish reasons, tokens); `act` is called once the stream has given `after` pieces."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    num_pieces, usage = 0, None
    with front.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == httpx.codes.OK
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                delta = choice["delta"]
                calls = delta.get("tool_calls", [])
                added = (delta.get("content") or "") + "".join(call["function"]["arguments"] for call in calls)
                texts[choice["index"]] = texts.get(choice["index"], "") + added
                reasons[choice["index"]] = choice["finish_reason"]
            usage = event["usage"] or usage
            num_pieces += 1
            if num_pieces == after:
                act()
    assert usage is not None
    return texts, reasons, usage["completion_tokens"]


@pytest.mark.parametrize(
    ("mode", "after"), [("greedy", 8), ("seeded", 4), ("two choices", 6), ("a call", 2), ("a chosen call", 5)]
)
def test_a_decode_worker_killed_in_a_document(serve: Serve, front: Front, mode: str, after: int) -> None:
    body = question(front, mode)
    expected = read(front, body)
    texts, reasons, _ = expected
    for index, text in texts.items():
        document = json.loads(text)
        jsonschema.validate(document, SCHEMA)
        assert len(document["items"]) == LENGTH
        assert reasons[index] == ("tool_calls" if "call" in mode else "stop")

    def ask(act: Act) -> Any:
        started_s = time.monotonic()
        answer = read(front, body, after, act)
        assert time.monotonic() - started_s < TIMEOUT_S
        return answer

    _, answers = strike_until_moved(serve, front, WRITING, signal.SIGKILL, ask)
    assert all(answer == expected for answer in answers)
