"""What clients get wrong: each answer is an OpenAI error object that names the field."""

import pytest
from tests.unit.router.site import MakeSite, Site

from disagg.core.errors import InvalidRequest
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.fields import read_object
from disagg.router.openai_types import read_chat, read_completion
from disagg.testing.generation import ready

BAD_COMMON: list[tuple[dict[str, object], str]] = [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": "10", "max_completion_tokens": 5}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": "10"}, "max_completion_tokens"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"seed": 0.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": 7}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": -100.5}}, "logit_bias.5"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"10000": 1}}, "logit_bias"),  # past the vocabulary
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"logit_bias": [[5, 1]]}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"presence_penalty": "much"}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1.1}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 4096, "max_tokens": None}, "min_tokens"),  # more than the context has room for
    ({"user": 5}, "user"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": [10_000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "stream"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": "x"}}, "stream_options.continuous_usage_stats"),
]

TOOL = {"type": "function", "function": {"name": "f"}}


def large_tool(number: int) -> dict[str, object]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"title": "x" * 50_000}}}


def schema_format(schema: object, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


BAD_CHAT: list[tuple[dict[str, object], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "boss", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].type",
    ),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning_content": 5}]}, "messages[0].reasoning_content"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": True}, "echo"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": {"type": "function"}}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "not-a-type"}}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": [large_tool(number) for number in range(6)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": 3}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": False}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    # The schema at the wrong level, none, or one that cannot be followed.
    ({"response_format": {"type": "json_schema", "schema": {"type": "object"}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": ""}}, "response_format.json_schema"),
    ({"response_format": schema_format(None)}, "response_format.json_schema.schema"),
    ({"response_format": schema_format("")}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"type": "not-a-type"})}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"$ref": "#"})}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"$ref": "#/nowhere"})}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"not": {}}, strict=True)}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"type": "string", "pattern": "(a"})}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"enum": ["x" * 300_000]})}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({}, strict="yes")}, "response_format.json_schema.strict"),
    ({"response_format": schema_format({}, name=None)}, "response_format.json_schema.name"),
    ({"response_format": schema_format({}, name="a b")}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
    ({"response_format": "json"}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
]

BAD_COMPLETION: list[tuple[dict[str, object], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1, 10_000]}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"echo": 1}, "echo"),
    ({"suffix": "x"}, "suffix"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMMON + BAD_CHAT)
async def test_bad_chat(site: Site, fields: dict[str, object], param: str) -> None:
    response = await site.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert site.service.streams == []


@pytest.mark.parametrize(("fields", "param"), BAD_COMMON + BAD_COMPLETION)
async def test_bad_completion(site: Site, fields: dict[str, object], param: str) -> None:
    response = await site.complete(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"].startswith(param)
    assert site.service.streams == []


async def test_neutral_values_are_taken(site: Site) -> None:
    names = ("n", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "user", "logprobs")
    nothing = dict.fromkeys((*names, "logit_bias", "presence_penalty"))
    common: dict[str, object] = {**nothing, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "n": 1.0}
    common |= {"skip_special_tokens": True, "include_stop_str_in_output": False, "bad_words": [], "grammar": ""}
    chat = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "top_k": 5, "made_up": {}}
    chat |= {"chat_template_kwargs": {}, "continue_final_message": False, "modalities": ["text"]}
    assert (await site.chat(**common, **chat)).status_code == 200
    assert (await site.complete(**common, echo=False, suffix="", best_of=1, made_up=1)).status_code == 200
    assert (await site.complete(n=2, best_of=2)).status_code == 200


async def test_what_is_asked_of_sampling_reaches_the_workers(site: Site) -> None:
    asked: dict[str, object] = {
        "top_k": 5,
        "min_p": 0.25,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "min_tokens": 3,
    }
    biased = {**asked, "logit_bias": {"7": -100, "5": 1.5}, "max_tokens": 4}
    assert (await site.chat(**biased)).status_code == 200
    assert (await site.complete(**biased)).status_code == 200
    for stream in site.service.streams:
        sampling = stream.request.sampling
        assert {name: getattr(sampling, name) for name in asked} == asked
        assert sampling.logit_bias == ((5, 1.5), (7, -100.0))
    assert (await site.complete(top_k=-1, logit_bias=None)).status_code == 200
    plain = site.service.streams[-1].request.sampling
    assert (plain.top_k, plain.logit_bias, plain.has_penalty, plain.min_tokens) == (0, (), False, 0)


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({"presence_penalty": 3}, ("-2.0", "2.0")),
        ({"min_p": 7}, ("0.0", "1.0")),
        ({"repetition_penalty": 0}, ("0.01", "100.0")),
        ({"logit_bias": {"3": 200}}, ("-100.0", "100.0")),
        ({"min_tokens": 20}, ("20", "16")),  # the default of max_tokens
    ],
)
async def test_a_refusal_names_value_and_limits(site: Site, fields: dict[str, object], limits: tuple[str, str]) -> None:
    message = (await site.complete(**fields)).json()["error"]["message"]
    assert all(limit in message for limit in limits), message


async def test_parts_and_roles(site: Site, tokenizer: ModelTokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "assistant"}, {"role": "user", "content": parts}]
    assert (await site.chat(messages=messages)).status_code == 200
    text = tokenizer.decode(site.service.streams[0].request.prompt_ids, skip_special_tokens=False)
    assert "<|im_start|>system\nbe kind<|im_end|>" in text
    assert "<|im_start|>assistant\n<|im_end|>" in text
    assert "<|im_start|>user\na\nb<|im_end|>" in text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b"\xff\xfe", b"[1]", b'"x"', b"null", b"NaN", b"[" * 100_000, b'{"a": "\\ud800 "}']
)
async def test_not_an_object(site: Site, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = await site.client.post(path, content=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_unknown_model(site: Site) -> None:
    for response in (await site.chat(model="gpt-9"), await site.complete(model="gpt-9")):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert "tiny" in response.json()["error"]["message"]


async def test_prompt_longer_than_the_context(make_site: MakeSite) -> None:
    site = make_site(statuses=[ready("tiny", 20)])
    for is_streamed in (False, True):
        for response in (
            await site.complete(prompt=[5] * 30, stream=is_streamed),
            await site.complete(prompt=[5] * 20, max_tokens=1, stream=is_streamed),
            await site.chat(messages=[{"role": "user", "content": "long " * 30}], stream=is_streamed),
        ):
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "prompt has" in error["message"]
            assert "20 tokens" in error["message"]
            assert "max_tokens" not in error["message"]


async def test_prompt_and_answer_longer_than_the_context(make_site: MakeSite) -> None:
    site = make_site(statuses=[ready("tiny", 20)])
    error = (await site.complete(prompt=[5] * 12, max_tokens=9)).json()["error"]
    assert all(number in error["message"] for number in ("12", "9", "21", "20", "at most 8"))
    assert (await site.complete(prompt=[5] * 12, max_tokens=8)).status_code == 200
    assert (await site.complete(prompt=[5] * 4)).status_code == 200  # exactly the default of 16
    assert (await site.complete(prompt=[5] * 5)).status_code == 400


async def test_how_long_an_answer_may_be_when_nobody_says_so(make_site: MakeSite) -> None:
    site = make_site(statuses=[ready("tiny", 64)])
    lengths: list[tuple[dict[str, object], int]] = [
        ({}, 16),
        ({"max_completion_tokens": None}, 16),
        ({"max_tokens": None}, 44),  # up to the context
        ({"max_tokens": None, "max_completion_tokens": 5}, 5),
    ]
    for fields, most in lengths:
        assert (await site.complete(prompt=[5] * 20, **fields)).status_code == 200
        asked = site.service.streams[-1].request
        assert (asked.sampling.max_tokens, asked.is_open_ended) == (most, most == 44), fields


async def test_model_without_template(site: Site) -> None:
    response = await site.chat(model="bare")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_chat_template"
    assert (await site.complete(model="bare")).status_code == 200


def test_readers_take_numbers_as_json_means_them() -> None:
    completion = read_completion(read_object(b'{"model":"m","prompt":"x","max_tokens":5.0,"temperature":1}'))
    assert (completion.params.max_tokens, completion.params.temperature) == (5, 1.0)
    chat = read_chat(read_object(b'{"model":"m","messages":[{"role":"user","content":"x"}],"stop":["a","a","b"]}'))
    assert (chat.params.stop, chat.params.max_tokens, chat.params.num_logprobs) == (("a", "b"), None, None)
    with pytest.raises(InvalidRequest):
        read_object(b"[]")
