"""The official Python client's whole tour: every method of it that has an endpoint here."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from tests.conformance.served import KEY, LIMITED_KEY, LIMITED_REQUESTS_PER_MINUTE, MODEL, Served

pytestmark = pytest.mark.timeout(200)
MESSAGES: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
PROMPT = "the quick brown fox"


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    is_tame: bool
    legs: Literal[2, 4]


class Move(pydantic.BaseModel):
    direction: Literal["left", "right"]


def connect(served: Served, key: str = KEY, max_retries: int = 0) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=key, max_retries=max_retries, http_client=http, timeout=60.0
    )


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with connect(served) as made:
        yield made


def chat(client: openai.OpenAI, **more: Any) -> Any:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **more}
    return client.chat.completions.create(**asked)


def complete(client: openai.OpenAI, **more: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more})


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_chat_with_everything(client: openai.OpenAI) -> None:
    answer = chat(client, n=2, logprobs=True, top_logprobs=3, seed=3, temperature=1, logit_bias={"7": -100}, user="me")
    assert answer.object == "chat.completion"
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id
    again = chat(client, n=2, seed=3, temperature=1, logit_bias={"7": -100})
    assert [choice.message.content for choice in again.choices] == [each.message.content for each in answer.choices]


def test_a_request_id_goes_through(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=2, extra_headers={"X-Request-Id": "from-the-tour"}
    )
    assert raw.headers["x-request-id"] == "from-the-tour"
    assert raw.parse().choices


def test_a_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    first, last = chunks[0], chunks[-1]
    assert first.choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0) as stream:
        # The client calls a completion that was cut short an error: only its parts are looked at.
        parts = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(parts) == text


def test_leaving_a_stream_early_is_nobodys_trouble(client: openai.OpenAI) -> None:
    with chat(client, stream=True, max_tokens=2000) as stream:
        next(iter(stream))
    assert chat(client).choices


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "over"], [5, 6, 7], [[5, 6], [7, 8, 9]]])
def test_completions_of_every_kind_of_prompt(client: openai.OpenAI, prompt: Any) -> None:
    whole = complete(client, prompt=prompt, echo=True, logprobs=2)
    streamed = list(complete(client, prompt=prompt, echo=True, logprobs=2, stream=True))
    for choice in whole.choices:
        assert choice.logprobs.token_logprobs[0] is None
        own = [part.choices[0] for part in streamed if part.choices[0].index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason


def test_stop_strings_end_an_answer(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=16).choices[0].text
    stop = next(each for each in text[2:] if each != "\ufffd")
    (choice,) = complete(client, max_tokens=16, stop=[stop]).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_extensions_go_in_the_extra_body(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_tokens": 4, "ignore_eos": True, "repetition_penalty": 1.1, "min_p": 0.1}
    assert complete(client, max_tokens=4, temperature=1, extra_body=extra).usage.completion_tokens == 4


def test_structured_answers_are_parsed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "seed": 3}
    parsed = client.chat.completions.parse(**asked, response_format=Animal)
    assert isinstance(parsed.choices[0].message.parsed, Animal)
    with client.chat.completions.stream(**asked, response_format=Animal) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed
    assert {"content.delta", "content.done"} <= kinds
    anything = chat(client, response_format={"type": "json_object"}, max_tokens=200, temperature=1, seed=3)
    assert anything.choices[0].finish_reason == "length" or isinstance(
        json.loads(anything.choices[0].message.content), dict
    )


def test_calls_streamed_and_answered(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Move)]
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": tools, "max_tokens": 300, "seed": 3}
    for choice in ("required", {"type": "function", "function": {"name": "Move"}}):
        enforced = {**asked, "tool_choice": choice, "parallel_tool_calls": False}
        message = client.chat.completions.parse(**enforced).choices[0].message
        (call, *_) = message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Move)
        with client.chat.completions.stream(**enforced) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.tool_calls
        assert final.tool_calls[0].function.arguments == call.function.arguments
        turn = message.model_dump(exclude={"parsed"}, exclude_none=True)
        said = [*MESSAGES, turn, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
        assert chat(client, messages=said, tools=tools).choices


def test_errors_are_of_the_class_they_are(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, model="none")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert unknown.value.request_id
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(client, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, prompt=[5] * 5000)
    assert "4096" in long.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model=MODEL, input="x")
    assert missing.value.code == "unsupported_endpoint"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="x")
    with connect(served, "nobody-knows-it") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.PermissionDeniedError):
        chat(client, extra_headers={"X-Priority": "99"})


def test_a_client_over_its_share_waits_as_long_as_it_is_told(served: Served) -> None:
    def hurry(hasty: openai.OpenAI) -> None:
        for _ in range(4 * LIMITED_REQUESTS_PER_MINUTE):
            complete(hasty, max_tokens=1)

    with connect(served, LIMITED_KEY) as hasty, pytest.raises(openai.RateLimitError) as refused:
        hurry(hasty)
    assert int(refused.value.response.headers["retry-after"]) >= 1
    with connect(served, LIMITED_KEY, max_retries=3) as patient:
        assert complete(patient, max_tokens=1).choices


def test_a_deadline_of_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.005).completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=3000, extra_body={"ignore_eos": True}
        )
    assert complete(client).choices


async def test_the_asynchronous_client(served: Served) -> None:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, http_client=http, timeout=60.0
    ) as client:

        async def text(seed: int) -> str:
            parts = []
            stream = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, seed=seed, stream=True)
            async for part in stream:
                parts.append(part.choices[0].text)
            return "".join(parts)

        texts = await asyncio.gather(*(text(seed % 4) for seed in range(8)))
    assert texts[:4] == texts[4:]
