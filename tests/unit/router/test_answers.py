"""Answers of both endpoints, whole and streamed, through the application without a socket."""

import json
from typing import Any

import httpx
import pytest
from tests.unit.router.site import MakeSite, Site

from disagg.core.errors import InternalFault, InvalidRequest, Overloaded, PeerLost, Unavailable
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.answer_format import finite
from disagg.testing.generation import Script


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Parsed events of a complete stream; its last line must be [DONE]."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def says(tokenizer: ModelTokenizer, *texts: str, end: bool = True) -> Script:
    return Script(tokens=tuple((*tokenizer.encode(text), *((2,) if end else ())) for text in texts))


async def test_whole_chat(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    script = Script(tokens=((*tokenizer.encode("Žlutý kůň 🙃"), 2),), num_cached_tokens=3)
    site = make_site(lambda request: script)
    response = await site.chat()
    assert response.status_code == 200
    (stream,) = site.service.streams
    prompt = stream.request.prompt_ids
    assert tokenizer.decode(prompt, False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    num_tokens = len(script.tokens[0])
    assert response.json() == {
        "id": "chatcmpl-fa4e-0",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Žlutý kůň 🙃", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": num_tokens,
            "total_tokens": len(prompt) + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    assert stream.num_aborts == 0


async def test_sampling_parameters_reach_the_service(site: Site) -> None:
    await site.chat(temperature=0, top_p=0.5, seed=-1, max_completion_tokens=7, top_logprobs=2, logprobs=True)
    await site.chat()
    await site.complete(ignore_eos=True, seed=5)
    first, second, third = (stream.request for stream in site.service.streams)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.max_tokens) == (0.0, 0.5, 7)
    assert (first.sampling.seed, first.sampling.num_logprobs, first.sampling.stop_token_ids) == (2**63 - 1, 2, (0, 2))
    assert (second.sampling.temperature, second.sampling.top_p, second.sampling.seed) == (1.0, 1.0, 77)
    assert second.sampling.max_tokens == 4096 - len(second.prompt_ids)
    assert (second.is_open_ended, first.is_open_ended) == (True, False)
    assert (third.sampling.max_tokens, third.sampling.stop_token_ids, third.sampling.seed) == (16, (), 5)


async def test_streamed_chat(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    text = "hello world 🙃 x"
    site = make_site(lambda request: says(tokenizer, text))
    chunks = chunks_of(await site.chat(stream=True))
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-fa4e-0"}
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
    assert len(deltas) > 4
    assert "".join(delta["content"] for delta in deltas[1:-1]) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in delta["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


@pytest.mark.parametrize(("options", "has_usage"), [({}, False), (None, False), ({"include_usage": True}, True)])
async def test_usage_chunk(make_site: MakeSite, tokenizer: ModelTokenizer, options: object, has_usage: bool) -> None:
    site = make_site(lambda request: says(tokenizer, "hello"))
    for response in (
        await site.chat(stream=True, stream_options=options),
        await site.complete(stream=True, stream_options=options),
    ):
        chunks = chunks_of(response)
        if not has_usage:
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
            continue
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len(tokenizer.encode("hello")) + 1
        assert chunks[-1]["id"] == chunks[0]["id"]


async def test_choices_interleave_with_their_index(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    texts = ["one two three", "x", "hello world"]
    site = make_site(lambda request: says(tokenizer, *texts))
    chunks = chunks_of(await site.chat(stream=True, n=3))
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in chunks[:3])
    for index, text in enumerate(texts):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine].count("stop") == 1
    whole = (await site.chat(n=3)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_stop_string_cuts_and_tells_the_service(
    make_site: MakeSite, tokenizer: ModelTokenizer, is_streamed: bool
) -> None:
    site = make_site(lambda request: says(tokenizer, "hello xyz world and more", "no stop in here"))
    response = await site.complete(stop=["yz w", "zz"], n=2, stream=is_streamed, max_tokens=50)
    if is_streamed:
        choices = [chunk["choices"][0] for chunk in chunks_of(response)]
    else:
        choices = response.json()["choices"]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)]
    assert texts == ["hello x", "no stop in here"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop", "stop"]
    (stream,) = site.service.streams
    assert (stream.finished_choices, stream.num_aborts) == ([0], 0)


async def test_length(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    site = make_site(lambda request: says(tokenizer, "a b c d e f g h"))
    body = (await site.complete(max_tokens=3)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    one = (await site.complete(max_tokens=1)).json()
    assert one["usage"]["completion_tokens"] == 1


async def test_first_token_ends_the_text(make_site: MakeSite) -> None:
    site = make_site(lambda request: Script(tokens=((2,),)))
    body = (await site.chat()).json()
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("", "stop")
    chunks = chunks_of(await site.chat(stream=True))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


async def test_several_prompts(site: Site, tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("once upon")
    for prompt, texts in (
        (["hello", "world"], ["hello", "world"]),
        ([ids, tokenizer.encode("a")], ["once upon", "a"]),
        (ids, ["once upon"]),
    ):
        body = (await site.complete(prompt=prompt, n=2)).json()
        # The fake answers with the prompt itself.
        assert [choice["text"] for choice in body["choices"]] == [text for text in texts for _ in range(2)]
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(texts)))
        assert body["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in texts)
        chunks = chunks_of(await site.complete(prompt=prompt, n=2, stream=True))
        for index, text in enumerate(text for text in texts for _ in range(2)):
            parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(part["text"] for part in parts) == text


async def test_chat_logprobs(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    text = "hello 🙃"
    ids = tokenizer.encode(text)
    site = make_site(lambda request: says(tokenizer, text))
    body = (await site.chat(logprobs=True, top_logprobs=2)).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in entries] == [tokenizer.token_bytes(id_) for id_ in ids]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in entries)
    chunks = chunks_of(await site.chat(logprobs=True, stream=True))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [len(entry["top_logprobs"]) for part in streamed if part for entry in part["content"]] == [0] * len(ids)


async def test_completion_logprobs(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    text = "hello world x"
    site = make_site(lambda request: says(tokenizer, text))
    for wanted in (0, 2):
        lists = (await site.complete(logprobs=wanted)).json()["choices"][0]["logprobs"]
        assert "".join(lists["tokens"]) == text
        pairs = zip(lists["text_offset"], lists["tokens"], strict=True)
        assert all(text[offset:].startswith(token) for offset, token in pairs)
        assert [len(top) for top in lists["top_logprobs"]] == [max(wanted, 1)] * len(lists["tokens"])
        assert lists["token_logprobs"] == [-0.5] * len(lists["tokens"])


def test_impossible_tokens_stay_json() -> None:
    assert finite(float("-inf")) == finite(float("nan")) == -9999.0
    assert finite(-1.25) == -1.25


# Failures

REFUSALS = [
    (InvalidRequest("no", param="prompt", code="c"), 400, "invalid_request_error", None),
    (Unavailable("no decode worker", retry_after_s=0.2), 503, "service_unavailable", "1"),
    (Overloaded("too many", retry_after_s=2.5), 429, "server_overloaded", "3"),
    (PeerLost("decode-0 is gone"), 502, "server_error", None),
    (InternalFault("broken"), 500, "server_error", None),
]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "retry"), REFUSALS)
async def test_failures_before_the_first_byte_are_statuses(
    make_site: MakeSite, error: Exception, status: int, kind: str, retry: str | None, is_streamed: bool
) -> None:
    for script in (Script(refusal=error), Script(failure=error)):  # type: ignore[arg-type]
        site = make_site(lambda request, script=script: script)
        for response in (await site.chat(stream=is_streamed), await site.complete(stream=is_streamed)):
            assert response.status_code == status
            assert response.json()["error"]["message"] == str(error)
            assert response.json()["error"]["type"] == kind
            assert response.headers.get("retry-after") == retry


async def test_failure_after_the_first_byte_is_an_event(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    script = Script(tokens=(tuple(tokenizer.encode("a b c d")),), failure=PeerLost("decode-0"), failure_after=2)
    site = make_site(lambda request: script)
    response = await site.chat(stream=True)
    assert response.status_code == 200
    last = response.text.rstrip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "decode-0"
    assert "[DONE]" not in response.text
    assert (await site.chat()).status_code == 502  # whole answers have no first byte before their last


async def test_a_bug_costs_one_request(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    broken = Script(tokens=((5, 6, 7),), failure=ValueError("secret detail"), failure_after=1)
    answers = iter([broken, broken, broken, says(tokenizer, "fine")])
    site = make_site(lambda request: next(answers))
    whole = await site.chat()
    assert whole.status_code == 500
    assert "secret" not in whole.text
    streamed = await site.chat(stream=True)
    assert json.loads(streamed.text.rstrip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == (
        "internal_error"
    )
    assert (await site.complete(prompt=["a"])).status_code == 500
    assert (await site.chat()).json()["choices"][0]["message"]["content"] == "fine"


async def test_one_prompt_fails_all(make_site: MakeSite) -> None:
    scripts = iter([Script(held_after=0), Script(failure=PeerLost("gone"))])
    site = make_site(lambda request: next(scripts))
    assert (await site.complete(prompt=["a", "b"])).status_code == 502
    assert site.service.streams[0].num_aborts == 1


async def test_a_refused_prompt_takes_back_the_earlier_ones(make_site: MakeSite) -> None:
    scripts = iter([Script(), Script(refusal=Overloaded("full", retry_after_s=1))])
    site = make_site(lambda request: next(scripts))
    assert (await site.complete(prompt=["a", "b"])).status_code == 429
    assert site.service.streams[0].num_aborts == 1
