"""What a model thinks and what it chooses to call, along every path; its marks are tokens, pushed to come up."""

import json
from typing import Any

import httpx
import jsonschema
import pytest
from tests.e2e.api_paths import MARKS, MODEL, Json, Paths, Reply
from tests.e2e.test_structured import DOCUMENT, SCHEMA, TOOLS

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("long paths")]
OPEN, CLOSE, CALL = MARKS
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
SURE = 100.0  # as far as a bias goes


@pytest.fixture
def paths(long_paths: Paths) -> Paths:
    return long_paths


def pushed(paths: Paths, *words: str) -> Json:
    """Fields that make these words the likeliest wherever they may come, and the choice between them chance's."""
    spelled = [paths.post({"model": MODEL, "prompt": word}, "/tokenize").body["tokens"] for word in words]
    assert [len(ids) for ids in spelled] == [1] * len(words)
    return {"logit_bias": {str(token_id): SURE for (token_id,) in spelled}, "temperature": 1.0, "seed": 7}


def chat(paths: Paths, **more: Any) -> Reply:
    """One whole answer. What it says is what its stream says, on every path."""
    reply = paths.chat("the quick brown fox", **more)
    assert reply.status == httpx.codes.OK, reply
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for name, front in paths.fronts.items():
        body = {"model": MODEL, "messages": [{"role": "user", "content": "the quick brown fox"}], **more, **options}
        lines = front.post(body, "/v1/chat/completions").text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
        assert events[-1]["usage"]["completion_tokens"] == reply.body["usage"]["completion_tokens"], name
        assert events[-1]["usage"]["completion_tokens_details"] == reply.body["usage"]["completion_tokens_details"]
        for choice in reply.choices:
            own = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
            check_stream(own, choice)
    return reply


def check_stream(parts: list[Json], whole: Json) -> None:
    deltas = [part["delta"] for part in parts]
    message = whole["message"]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (message["reasoning_content"] or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    for number, call in enumerate(message.get("tool_calls", [])):
        own = [each["function"] for each in calls if each["index"] == number]
        assert "".join(each["arguments"] for each in own) == call["function"]["arguments"]
        assert [each["name"] for each in own if "name" in each] == [call["function"]["name"]]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [whole["finish_reason"]]


def thought_tokens(reply: Reply) -> int:
    return int(reply.body["usage"]["completion_tokens_details"]["reasoning_tokens"])


def check_calls(message: Json) -> None:
    for call in message["tool_calls"]:
        (schema,) = [each["function"] for each in TOOLS if each["function"]["name"] == call["function"]["name"]]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema["parameters"])


def test_case_38_thought_tokens_count_once_however_they_came(paths: Paths) -> None:
    """Two of the three are thought: what is said after them is a document."""
    reply = chat(paths, response_format=DOCUMENT, max_tokens=300, n=3, **pushed(paths, OPEN, CLOSE))
    thoughts = [choice["message"]["reasoning_content"] for choice in reply.choices]
    # The first mark opens the thought, what follows is part of it, and its last token closes it.
    assert thought_tokens(reply) == sum(2 + (thought or "").count(OPEN) for thought in thoughts)
    assert thought_tokens(reply) < reply.body["usage"]["completion_tokens"]
    for choice in reply.choices:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_case_38_a_thought_that_does_not_end_is_all_there_is(paths: Paths, max_tokens: int) -> None:
    reply = chat(paths, max_tokens=max_tokens, **pushed(paths, OPEN))
    assert thought_tokens(reply) == reply.body["usage"]["completion_tokens"] == max_tokens
    assert thought_tokens(chat(paths, max_tokens=max_tokens, ignore_eos=True, **pushed(paths, CALL))) == 0


def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(paths: Paths) -> None:
    asked = {"tools": STRICT, "max_tokens": 200}
    (one,) = chat(paths, **asked, parallel_tool_calls=False, **pushed(paths, CALL)).choices
    assert (one["finish_reason"], len(one["message"]["tool_calls"])) == ("tool_calls", 1)
    check_calls(one["message"])
    (many,) = chat(paths, **asked, **pushed(paths, CALL)).choices
    assert len(many["message"]["tool_calls"]) > 1
    check_calls({"tool_calls": many["message"]["tool_calls"][:-1]})  # the last may be cut short
    free = chat(paths, tools=STRICT, max_tokens=20, temperature=1.0, seed=3).choices[0]["message"]
    assert "tool_calls" not in free
    assert free["content"]


def test_a_strict_call_after_a_thought_that_speaks_of_one(paths: Paths) -> None:
    asked = {"tools": STRICT, "parallel_tool_calls": False, "max_tokens": 250, "n": 4}
    reply = chat(paths, **asked, **pushed(paths, *MARKS))
    thoughts = [choice["message"]["reasoning_content"] or "" for choice in reply.choices]
    assert any(CALL in thought for thought in thoughts), thoughts
    called = [choice["message"] for choice in reply.choices if choice["finish_reason"] == "tool_calls"]
    assert called
    for message in called:
        check_calls(message)


@pytest.mark.parametrize("word", [CALL, OPEN])
def test_case_05_what_a_stop_string_held_back_comes_out_through_the_parsers(paths: Paths, word: str) -> None:
    """The whole answer could still have become a stop string when it ended."""
    asked = {"tools": TOOLS, "max_tokens": 1, **pushed(paths, word)}
    plain = chat(paths, **asked)
    held = chat(paths, **asked, stop=[f"{word}never"])
    assert held.choices == plain.choices
    message = held.choices[0]["message"]
    assert (message["content"], held.choices[0]["finish_reason"]) == (CALL if word == CALL else "", "length")
    cut = chat(paths, **asked, stop=[word])
    assert (cut.choices[0]["message"]["content"] or "", cut.choices[0]["finish_reason"]) == ("", "stop")
