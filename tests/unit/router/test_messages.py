"""Tools, reasoning and structured answers through the application: what is asked of workers, what clients read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.router.site import MakeSite, Site
from tests.unit.router.test_answers import chunks_of, says

from disagg.core.grammar import GrammarKind
from disagg.modelfiles.chat_template import ChatTemplate
from disagg.modelfiles.grammar import GrammarCompiler
from disagg.modelfiles.tokenizer import ModelTokenizer, load_tokenizer
from disagg.router.openai_types import read_chat
from disagg.router.parser_names import ReasoningParser, ToolParser
from disagg.router.text import ModelText, chat_requests
from disagg.testing.generation import ready
from disagg.testing.tokenizer_files import write_tiny_tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
SHOWN = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}|{{ tool | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "({{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }})"
    "{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}"
    "{% if m.reasoning_content %}~{{ m.reasoning_content }}{% endif %}>{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Praha"}}\n</tool_call>'
MakeText = Callable[..., ModelText]


@pytest.fixture
def make_text(tokenizer: ModelTokenizer) -> MakeText:
    def make(template: str = SHOWN, **parsers: Any) -> ModelText:
        return ModelText(tokenizer, ChatTemplate(template, tokenizer.named_tokens), **parsers)

    return make


def site_with(make_site: MakeSite, text: ModelText, *said: str) -> Site:
    return make_site(lambda request: says(text.tokenizer, *said), (ready("tiny"),), models={"tiny": text})


def prompt_of(site: Site, tokenizer: ModelTokenizer) -> str:
    return tokenizer.decode(site.service.streams[-1].request.prompt_ids, False)


async def test_the_template_is_given_tools_and_turns(make_site: MakeSite, make_text: MakeText) -> None:
    text = make_text()
    site = site_with(make_site, text, "ok")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Brno"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    assert (await site.chat(messages=messages, tools=[WEATHER])).status_code == 200
    prompt = prompt_of(site, text.tokenizer)
    assert prompt == (
        f'[weather|{json.dumps(WEATHER)}]<user:hi><assistant:(call_1 weather {{"city": "Brno"}})~hm><tool:sunny#call_1>'
    )


async def test_a_tool_answers_a_call_that_was_made(site: Site) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    asked, made = {"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}
    answer, other = ({"role": "tool", "tool_call_id": f"call_{number}", "content": "sunny"} for number in (1, 2))
    for messages in ([answer], [asked, answer], [asked, made, asked, answer], [asked, made, other]):
        response = await site.chat(messages=messages)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"messages[{len(messages) - 1}].tool_call_id"
    assert (await site.chat(messages=[asked, made, answer, answer])).status_code == 200


def test_many_answers_to_one_call_take_time_in_proportion() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    answer = {"role": "tool", "tool_call_id": "c", "content": "x"}
    messages = [{"role": "assistant", "tool_calls": [call]}, *[answer] * 60_000]
    assert len(read_chat({"model": "m", "messages": messages}).messages) == 60_001


async def test_a_template_without_tools_is_spelled_them_out(site: Site, tokenizer: ModelTokenizer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Brno"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert (await site.chat(messages=messages, tools=[WEATHER])).status_code == 200
    prompt = prompt_of(site, tokenizer)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert json.dumps(WEATHER) in prompt
    assert CALL.replace("Praha", "Brno") in prompt
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in prompt


async def test_none_shows_no_tools_and_looks_for_no_calls(make_site: MakeSite, make_text: MakeText) -> None:
    text = make_text()
    site = site_with(make_site, text, CALL)
    response = await site.chat(tools=[WEATHER], tool_choice="none")
    assert prompt_of(site, text.tokenizer) == "<user:hi>"
    (choice,) = response.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "tool_calls" not in choice["message"]


async def test_a_whole_call(make_site: MakeSite, make_text: MakeText) -> None:
    site = site_with(make_site, make_text(), f"Let me see.\n{CALL}\n{CALL.replace('Praha', 'Brno')}")
    (choice,) = (await site.chat(tools=[WEATHER, CLOCK])).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "tool_calls": [
            {
                "id": f"call_fa4e-0-0-{number}",
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps({"city": city})},
            }
            for number, city in enumerate(("Praha", "Brno"))
        ],
    }


def joined(response: httpx.Response, index: int = 0) -> dict[str, Any]:
    """A stream's message put together as OpenAI's clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks_of(response):
        (choice,) = chunk["choices"]
        if choice["index"] != index:
            continue
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["calls"]):
                assert call["type"] == "function"
                message["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert not {"id", "type"} & call.keys()
                assert call["function"].keys() == {"arguments"}
            message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["finish"] = choice["finish_reason"] or message["finish"]
    return message


async def test_streamed_and_whole_are_the_same_message(make_site: MakeSite, make_text: MakeText) -> None:
    said = f"<think>where?\n</think>\n\nLet me see. {CALL}", "just <words> </tool_call>"
    text = make_text(reasoning_parser=ReasoningParser.THINK)
    site = site_with(make_site, text, *said)
    whole = (await site.chat(tools=[WEATHER], n=2)).json()["choices"]
    streamed = await site.chat(tools=[WEATHER], n=2, stream=True)
    for index, choice in enumerate(whole):
        message, parts = choice["message"], joined(streamed, index)
        assert parts["content"] == (message["content"] or "")
        assert parts["reasoning"] == (message["reasoning_content"] or "")
        assert parts["finish"] == choice["finish_reason"]
        calls = message.get("tool_calls", [])
        assert [call["arguments"] for call in parts["calls"]] == [call["function"]["arguments"] for call in calls]
    first, second = (choice["message"] for choice in whole)
    assert (first["content"], first["reasoning_content"]) == ("Let me see.", "where?")
    assert (second["content"], second["reasoning_content"]) == ("just <words> </tool_call>", None)
    assert joined(streamed, 0)["calls"][0]["id"] == "call_fa4e-1-0-0"


async def test_logprobs_of_held_back_text_are_not_lost(make_site: MakeSite, make_text: MakeText) -> None:
    text = make_text()
    site = site_with(make_site, text, f"So: {CALL}")
    asked: dict[str, Any] = {"tools": [WEATHER], "logprobs": True, "top_logprobs": 1}
    whole = (await site.chat(**asked)).json()["choices"][0]["logprobs"]["content"]
    chunks = chunks_of(await site.chat(**asked, stream=True))
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert whole == streamed
    assert b"".join(bytes(entry["bytes"]) for entry in streamed).decode() == f"So: {CALL}"


def test_a_plain_chat_is_read_as_it_comes(make_text: MakeText) -> None:
    """No reader stands between its tokens and the client: nothing is held back, and each costs as little as it did."""
    messages = [{"role": "user", "content": "hi"}]
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"response_format": {"type": "json_object"}}):
        asked = read_chat({"model": "tiny", "messages": messages, **more})
        _, plan = chat_requests(asked, make_text(), ready("tiny"), 1)
        assert plan.reading is None


async def test_counts_so_far_come_with_every_part_of_a_message(make_site: MakeSite, make_text: MakeText) -> None:
    site = site_with(make_site, make_text(), f"So: {CALL}")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(await site.chat(tools=[WEATHER], stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"] is not None]
    assert len(counts) == len(chunks) - 1  # the opening comes before any token
    assert counts == sorted(counts)
    assert counts[-1] > counts[0] > 0


async def test_a_message_comes_with_its_prompts_log_probabilities(make_site: MakeSite, make_text: MakeText) -> None:
    text = make_text()
    site = site_with(make_site, text, "plain")
    answer = (await site.chat(tools=[WEATHER], prompt_logprobs=1)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in (await site.chat(tools=[WEATHER])).json()


async def test_tokenize_shows_tools_as_a_chat_does(make_site: MakeSite, make_text: MakeText) -> None:
    site = site_with(make_site, make_text(), "plain")
    messages = [{"role": "user", "content": "hi"}]
    for more in ({"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}, {}):
        asked = {"model": "tiny", "messages": messages, **more}
        counted = (await site.client.post("/tokenize", json=asked)).json()
        await site.chat(messages=messages, **more)
        assert tuple(counted["tokens"]) == site.service.streams[-1].request.prompt_ids


async def test_a_template_that_begins_the_thought(make_site: MakeSite, make_text: MakeText) -> None:
    text = make_text("{{ messages[0].content }}{# </think> #}<think>\n")
    site = site_with(make_site, text, "hm\n</think>Yes.", "never said")
    first, second = ((each["message"]) for each in (await site.chat(n=2)).json()["choices"])
    assert (first["content"], first["reasoning_content"]) == ("Yes.", "hm")
    assert (second["content"], second["reasoning_content"]) == (None, "never said")


async def test_a_schema_reaches_the_workers(site: Site, tokenizer: ModelTokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert (await site.chat(response_format=asked, ignore_eos=True)).status_code == 200
    sampling = site.service.streams[-1].request.sampling
    assert sampling.grammar is not None
    assert sampling.grammar.kind is GrammarKind.JSON_SCHEMA
    assert sampling.stop_token_ids == tokenizer.eos_ids  # an answer by a grammar ends, asked to or not
    state = GrammarCompiler(tokenizer).start(sampling.grammar)
    state.accept(tokenizer.encode('{"a": 1}'))
    assert state.can_end


@pytest.mark.parametrize(
    ("more", "good", "bad"),
    [
        ({"tool_choice": "required"}, [CALL, f"{CALL}\n{CALL}"], ["hi", '{"name": "weather"}']),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL], [f"{CALL}\n{CALL}"]),
        (
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
            ['<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'],
            [CALL],
        ),
        ({"response_format": {"type": "json_object"}}, [CALL, '{"a": [1, "x"]}'], ["hi", "[1]"]),
    ],
)
async def test_what_is_enforced(
    make_site: MakeSite, make_text: MakeText, more: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    text = make_text()
    site = site_with(make_site, text, "x")
    assert (await site.chat(tools=[WEATHER, CLOCK], **more)).status_code == 200
    grammar = site.service.streams[-1].request.sampling.grammar
    assert grammar is not None
    compiler = GrammarCompiler(text.tokenizer)
    for answer in good:
        state = compiler.start(grammar)
        state.accept(text.tokenizer.encode(answer))
        assert state.can_end
    for answer in bad:
        state = compiler.start(grammar)
        with pytest.raises(Exception, match="does not allow"):
            state.accept(text.tokenizer.encode(answer))


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_thought_passes_before_a_document(make_site: MakeSite, make_text: MakeText, is_open: bool) -> None:
    text = make_text("{{ messages[0].content }}{# </think> #}" + "<think>\n" * is_open)
    site = site_with(make_site, text, "x")
    assert (await site.chat(response_format={"type": "json_object"})).status_code == 200
    grammar = site.service.streams[-1].request.sampling.grammar
    assert grammar is not None
    for begun in ("hm {no} <b>\n</think>\n\n",) if is_open else ("<think>\nhm</think>", "\n<think></think>\n", ""):
        state = GrammarCompiler(text.tokenizer).start(grammar)
        state.accept(text.tokenizer.encode(begun + '{"a": 1}'))
        assert state.can_end


async def test_llama_rules_are_what_its_parser_reads(make_site: MakeSite, make_text: MakeText) -> None:
    answer = '{"name": "weather", "parameters": {"city": "Praha"}}; {"name": "clock", "parameters": {}}'
    text = make_text(tool_parser=ToolParser.LLAMA3)
    site = site_with(make_site, text, answer)
    (choice,) = (await site.chat(tools=[WEATHER, CLOCK], tool_choice="required")).json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather", "clock"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    grammar = site.service.streams[-1].request.sampling.grammar
    assert grammar is not None
    state = GrammarCompiler(text.tokenizer).start(grammar)
    state.accept(text.tokenizer.encode(answer))
    assert state.can_end


async def test_tools_where_none_are_parsed(make_site: MakeSite, make_text: MakeText) -> None:
    site = site_with(make_site, make_text(tool_parser=ToolParser.NONE), "x")
    response = await site.chat(tools=[WEATHER])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert (await site.chat(tools=[WEATHER], tool_choice="none")).status_code == 200


async def test_without_the_library_only_what_needs_it_is_refused(
    make_site: MakeSite, make_text: MakeText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.modelfiles.grammar._MISSING", "No module named 'llguidance'")
    site = site_with(make_site, make_text(), CALL)
    response = await site.chat(response_format={"type": "json_object"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_parameter")
    assert "pip install llguidance" in error["message"]
    assert (await site.chat(tools=[WEATHER])).json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_template_of_its_own_for_tools(make_site: MakeSite, tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": f"{SHOWN} <|python_tag|>"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    text = ModelText(load_tokenizer(folder))
    assert text.tool_parser is ToolParser.LLAMA3
    site = site_with(make_site, text, "ok")
    await site.chat()
    assert prompt_of(site, text.tokenizer) == "plain"
    await site.chat(tools=[CLOCK])
    assert prompt_of(site, text.tokenizer).startswith("[clock|")


async def test_marks_are_read_where_they_are_special_tokens_too(make_site: MakeSite, tmp_path: Path) -> None:
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    file = write_tiny_tokenizer(tmp_path, words=marks) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] = [{**token, "special": True} for token in content["added_tokens"]]
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert all(set(tokenizer.encode(mark)) <= tokenizer.special_ids for mark in marks)
    template = ChatTemplate(SHOWN, tokenizer.named_tokens)
    text = ModelText(tokenizer, template, reasoning_parser=ReasoningParser.THINK)
    site = site_with(make_site, text, f"<think>a</think>b {CALL}")
    (choice,) = (await site.chat(tools=[WEATHER])).json()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == ("a", "b", "tool_calls")
    streamed = joined(await site.chat(tools=[WEATHER], stream=True))
    assert streamed["calls"][0]["arguments"] == message["tool_calls"][0]["function"]["arguments"] == '{"city": "Praha"}'
    assert (streamed["reasoning"], streamed["content"]) == ("a", "b")
    # Who searches for nothing is shown none of them.
    assert (await site.complete()).json()["choices"][0]["text"].startswith("ab ")
