"""The prompt as part of its answer: text, log probabilities, and what waits for them."""

import asyncio

import pytest
from tests.unit.router.site import MakeSite, Site
from tests.unit.router.test_answers import chunks_of, says

from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.choice import ChoiceText, EchoedPrompt
from disagg.router.openai_types import MAX_PROMPT_LOGPROBS
from disagg.router.text import MAX_PROMPT_SCORES
from disagg.testing.generation import Script, ready


async def test_the_text_comes_first_in_each_choice(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    site = make_site(lambda request: says(tokenizer, " one", " two"))
    body: dict[str, object] = {"prompt": ["the fox", "a dog"], "n": 2, "echo": True}
    texts = ["the fox one", "the fox two", "a dog one", "a dog two"]
    whole = (await site.complete(**body)).json()
    assert [choice["text"] for choice in whole["choices"]] == texts
    chunks = chunks_of(await site.complete(**body, stream=True))
    streamed = ["", "", "", ""]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    assert site.service.streams[0].request.sampling.num_prompt_logprobs is None


async def test_log_probabilities_of_prompt_and_answer_are_one_list(
    make_site: MakeSite, tokenizer: ModelTokenizer
) -> None:
    site = make_site(lambda request: says(tokenizer, " one"))
    prompt = tokenizer.encode("the fox")
    answer = (await site.complete(prompt=prompt, echo=True, logprobs=1)).json()["choices"][0]
    logprobs = answer["logprobs"]
    assert answer["text"] == "the fox one"
    assert "".join(logprobs["tokens"]) == "the fox one"
    expected = [None, *(-float(token) for token in prompt[1:])]
    assert logprobs["token_logprobs"][: len(prompt)] == expected
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][1]) == 2
    spelled = [len("".join(logprobs["tokens"][:number])) for number in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == spelled


async def test_other_choices_wait_for_the_first_ones_scores(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    """Only the first choice's worker is asked about the prompt; its first token may come last."""
    site = make_site(lambda request: says(tokenizer, " one", " two", " three"))
    choices = (await site.complete(prompt="the fox", echo=True, logprobs=0, n=3)).json()["choices"]
    columns = [choice["logprobs"]["token_logprobs"] for choice in choices]
    num_prompt = len(tokenizer.encode("the fox"))
    assert columns[0][:num_prompt] == columns[1][:num_prompt] == columns[2][:num_prompt]
    assert columns[0][0] is None


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_nothing_written(make_site: MakeSite, tokenizer: ModelTokenizer, logprobs: int | None) -> None:
    site = make_site(lambda request: says(tokenizer, " never"))
    for is_streamed in (False, True):
        response = await site.complete(
            prompt="the fox", echo=True, max_tokens=0, logprobs=logprobs, stream=is_streamed, stop="fox"
        )
        body = chunks_of(response) if is_streamed else [response.json()]
        choices = [choice for each in body for choice in each["choices"]]
        assert "".join(choice["text"] for choice in choices) == "the fox"  # stop strings are for what is written
        assert choices[-1]["finish_reason"] == "length"
        if not is_streamed:
            assert body[0]["usage"]["completion_tokens"] == 0
    assert {stream.request.sampling.max_tokens for stream in site.service.streams} == {1}


async def test_a_prompt_as_long_as_the_context(make_site: MakeSite) -> None:
    site = make_site(statuses=[ready("tiny", 20)])
    echo: dict[str, object] = {"prompt": [5] * 20, "echo": True, "max_tokens": 0}
    for is_streamed in (False, True):
        assert (await site.complete(**echo, logprobs=1, stream=is_streamed)).status_code == 200
    asked = site.service.streams[-1].request
    assert (asked.is_prompt_only, asked.sampling.max_tokens) == (True, 1)
    for more in ({"max_tokens": 1}, {"prompt": [5] * 21}):
        error = (await site.complete(**{**echo, **more})).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "20 tokens" in error["message"]
        assert ("at least one" in error["message"]) == ("max_tokens" in more)


async def test_prompt_logprobs_by_themselves(site: Site, tokenizer: ModelTokenizer) -> None:
    prompt = [300, 301, 302]
    (choice,) = (await site.complete(prompt=prompt, prompt_logprobs=2, max_tokens=1)).json()["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert set(second) == {"301", "0", "1"}
    assert second["301"] == {"logprob": -301.0, "rank": None, "decoded_token": tokenizer.decode([301], False)}
    assert (third["0"]["rank"], third["1"]["rank"]) == (1, 2)
    chat = (await site.chat(prompt_logprobs=0, max_tokens=1)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in (await site.complete()).json()["choices"][0]


async def test_more_scores_than_a_message_holds(make_site: MakeSite) -> None:
    site = make_site(statuses=[ready("tiny", 1 << 20)])
    count = MAX_PROMPT_SCORES // (MAX_PROMPT_LOGPROBS + 1) + 1
    response = await site.complete(prompt=[5] * count, prompt_logprobs=MAX_PROMPT_LOGPROBS)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_logprobs")
    assert (await site.complete(prompt=[5] * count, prompt_logprobs=3)).status_code == 200


async def test_stop_tokens_reach_the_workers(site: Site) -> None:
    await site.complete(stop_token_ids=[7, 7, 9])
    await site.complete(stop_token_ids=[7], ignore_eos=True)
    first, second = (stream.request.sampling.stop_token_ids for stream in site.service.streams)
    assert (first, second) == ((0, 2, 7, 9), (7,))


async def test_min_tokens_holds_back_stop_strings(make_site: MakeSite, tokenizer: ModelTokenizer) -> None:
    ids = tuple(tokenizer.encode("a b c a b c"))
    site = make_site(lambda request: Script(tokens=(ids,)))
    to_the_first = len(tokenizer.encode("a b"))  # a stop that ends with the last token that must be there counts not
    for least, text in ((0, "a "), (to_the_first - 1, "a "), (to_the_first, "a b c a "), (len(ids), "a b c a b c")):
        for is_streamed in (False, True):
            response = await site.complete(stop="b", min_tokens=least, stream=is_streamed)
            body = chunks_of(response) if is_streamed else [response.json()]
            shown = "".join(choice["text"] for each in body for choice in each["choices"])
            assert shown == text, (least, is_streamed)


def test_an_answer_may_complete_the_prompts_last_character(tokenizer: ModelTokenizer) -> None:
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    ids = [by_bytes[bytes([byte])] for byte in "🙂".encode()]
    for cut in range(1, 4):
        choice = ChoiceText(0, tokenizer, None, ())
        text = choice.echo(EchoedPrompt(tuple(ids[:cut]), None, None)).text
        assert text == ""
        for token_id in ids[cut:]:
            text += choice._detokenizer.push(token_id)
        assert text == "🙂"


async def test_a_client_that_goes_while_an_echo_is_held(make_site: MakeSite) -> None:
    site = make_site(lambda request: Script(held_after=0))
    asking = asyncio.create_task(site.complete(echo=True, logprobs=1))
    await site.service.submitted.wait()
    asking.cancel()
    await asyncio.wait({asking})
    await asyncio.wait_for(site.service.streams[0].aborted.wait(), 10.0)
