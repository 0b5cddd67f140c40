"""Structured answers and calls of a real model, the same bodies mixed, local and disaggregated; the official client.

Last comes what ends the clusters that these tests share.
"""

import json
import signal
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from tests.e2e.api_paths import MODEL, Json, Paths, all_paths, completion
from tests.e2e.cluster import Front, caught

from disagg.telemetry import metrics as table
from disagg.testing.model_files import write_tiny_llama

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "žába"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}
DOCUMENT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("first", "second")
]
QUESTIONS: dict[str, dict[str, Any]] = {
    "document": {"response_format": DOCUMENT},
    "greedy document": {"response_format": DOCUMENT, "temperature": 0},
    "three documents": {"response_format": DOCUMENT, "n": 3, "logprobs": True, "top_logprobs": 3},
    "filtered document": {"response_format": DOCUMENT, "top_k": 40, "top_p": 0.9, "frequency_penalty": 0.3},
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "several": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "second"}}},
    "auto": {"tools": TOOLS, "max_tokens": 30},
    "cut short": {"response_format": DOCUMENT, "max_tokens": 5},
}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paths]:
    """Tools make long prompts of a tokenizer this small."""
    model = write_tiny_llama(tmp_path_factory.mktemp("served") / MODEL, max_context=4096)
    with all_paths(model) as made:
        yield made


@pytest.fixture
def fronts(paths: Paths) -> Mapping[str, Front]:
    return paths.fronts


def question(name: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 200, "seed": 11, **QUESTIONS[name], **more}


def without_ids(value: Any) -> Any:
    """What must be equal."""
    if isinstance(value, dict):
        hidden = {"id", "created", "prompt_tokens_details"}
        return {key: without_ids(each) for key, each in value.items() if key not in hidden}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def whole(front: Front, body: dict[str, Any]) -> dict[str, Any]:
    response = front.post(body, "/v1/chat/completions")
    assert response.status_code == httpx.codes.OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(front: Front, body: dict[str, Any]) -> dict[int, list[Any]]:
    """Chunks by choice; how a step's tokens share chunks may differ, what they add up to may not."""
    found: dict[int, list[Any]] = {}
    asked = {**body, "stream": True}
    with front.client.stream("POST", "/v1/chat/completions", json=asked) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        (choice,) = json.loads(line)["choices"]
        found.setdefault(choice["index"], []).append(choice)
    return found


@pytest.mark.parametrize("name", QUESTIONS)
def test_bodies_are_equal_whichever_way_it_went(fronts: Mapping[str, Front], name: str) -> None:
    bodies = {path: without_ids(whole(front, question(name))) for path, front in fronts.items()}
    assert bodies["local"] == bodies["mixed"]
    assert bodies["disaggregated"] == bodies["mixed"]
    for choice in bodies["mixed"]["choices"]:
        message = choice["message"]
        if name == "cut short":
            assert choice["finish_reason"] == "length"
        elif "document" in name:
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
        elif name in ("required", "several", "named"):
            # A named function "stops", one that had to be chosen was a call.
            assert choice["finish_reason"] == ("stop" if name == "named" else "tool_calls")
            assert message["content"] is None
            for call in message["tool_calls"]:
                assert json.loads(call["function"]["arguments"])["x"] in range(10)
                assert call["function"]["name"] == "second" or name != "named"
            assert len(message["tool_calls"]) == 1 or name == "several"


def test_the_remote_way_was_gone(fronts: Mapping[str, Front]) -> None:
    """Or the bodies above prove nothing."""
    assert fronts["disaggregated"].readings().total(table.HANDOFFS, outcome="received") > 0


@pytest.mark.parametrize("name", ["document", "required", "auto"])
def test_streams_add_up_to_the_whole(fronts: Mapping[str, Front], name: str) -> None:
    for front in fronts.values():
        (choice,) = whole(front, question(name))["choices"]
        (chunks,) = streamed(front, question(name)).values()
        deltas = [chunk["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == (choice["message"]["content"] or "")
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        for number, call in enumerate(choice["message"].get("tool_calls", [])):
            parts = [each["function"]["arguments"] for each in calls if each["index"] == number]
            assert "".join(parts) == call["function"]["arguments"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("seed", range(12))
def test_every_seed_gives_a_valid_document(fronts: Mapping[str, Front], seed: int) -> None:
    (choice,) = whole(fronts["disaggregated"], question("document", seed=seed, temperature=1))["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_what_no_worker_could_follow_is_refused(fronts: Mapping[str, Front]) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "not-a-type"}}}
    response = fronts["disaggregated"].post(question("document", response_format=bad), "/v1/chat/completions")
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert response.json()["error"]["param"] == "response_format.json_schema.schema"
    assert "not-a-type" in response.json()["error"]["message"]


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    is_tame: bool
    legs: Literal[2, 4] | None


class Move(pydantic.BaseModel):
    direction: Literal["left", "right"]


def test_the_official_client_parses(fronts: Mapping[str, Front]) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)
    url = f"{fronts['disaggregated'].url}/v1"
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0, http_client=http) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        parsed = client.chat.completions.parse(
            model=MODEL, messages=messages, response_format=Animal, max_tokens=200, seed=3
        )
        assert isinstance(parsed.choices[0].message.parsed, Animal)
        tools = [openai.pydantic_function_tool(Move)]
        called = client.chat.completions.parse(
            model=MODEL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=3
        )
        (call, *_) = called.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Move)
        assert called.choices[0].finish_reason == "tool_calls"
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=3
        ) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.tool_calls
        assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
        made = {"id": call.id, "type": "function", "function": {"name": "Move", "arguments": call.function.arguments}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=4)


def test_case_32_a_failure_after_the_first_byte_is_an_event_and_no_done(paths: Paths) -> None:
    """The router is told to end in the middle, and all that belongs to it ends: a client can tell that from success."""
    errors: dict[str, Json] = {}
    for name, front in paths.fronts.items():
        asked = completion("the quick brown fox", max_tokens=3500, stream=True)
        serve = paths.serves[name]
        writer = serve.pid_of("mixed-0" if name == "mixed" else "decode-0")
        with caught(front, asked, [writer], num_events=4) as stream:
            serve.kill("router", signal.SIGTERM)
            lines = [line for line in stream.lines if line]
        assert "data: [DONE]" not in lines
        assert all("error" not in json.loads(line.removeprefix("data: ")) for line in lines[:-1])
        errors[name] = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert errors["mixed"]["code"] == "service_unavailable"
    assert all(error == errors["mixed"] for error in errors.values())
