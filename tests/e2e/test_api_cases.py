"""What servers of this API have got wrong, case by case, along every path: mixed, disaggregated, and local on decode.

Cases of requests that come to no whole answer are in test_api_ends.py, of thoughts and calls in
test_calls_and_thoughts.py and test_structured.py.
"""

import itertools
from pathlib import Path

import httpx
import pytest
from tests.e2e.api_paths import MODEL, Json, Paths, Reply, completion
from tests.parity.tiny_models import TINY_CONTEXT, TINY_VOCAB

from disagg.modelfiles.tokenizer import ModelTokenizer, load_tokenizer
from disagg.telemetry import metrics as table

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("plain paths")]
PROMPT = "the quick brown fox jumps over"
NUMBERS = itertools.count(3)


@pytest.fixture
def paths(plain_paths: Paths) -> Paths:
    return plain_paths


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> ModelTokenizer:
    return load_tokenizer(tiny_llama)


def fresh_ids(count: int) -> list[int]:
    """A prompt that no earlier test has sent: nothing of it is cached anywhere."""
    start = next(NUMBERS)
    return [3 + (start * 7 + place * (1 + start % 5)) % 300 for place in range(count)]


def joined(reply: Reply, index: int = 0) -> str:
    return "".join(choice["text"] for choice in reply.streamed(index))


# --- streams and usage --------------------------------------------------------------------------------------------


def test_case_01_empty_stream_options_give_no_usage(paths: Paths) -> None:
    reply = paths.complete(PROMPT, stream=True, stream_options={})
    assert reply.events
    assert not [event for event in reply.events if "usage" in event]


def test_case_02_include_usage_is_one_chunk_more_and_null_before(paths: Paths) -> None:
    reply = paths.complete(fresh_ids(20), stream=True, stream_options={"include_usage": True})
    *others, last = reply.events
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (20, 6)
    assert others
    assert all(event["usage"] is None for event in others)


def test_continuous_usage_counts_up(paths: Paths) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = paths.complete(fresh_ids(20), stream=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in reply.events]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_case_29_index_is_the_choice_and_each_finishes_once(paths: Paths) -> None:
    whole = paths.complete(PROMPT, n=3, temperature=1.0, seed=5)
    texts = [choice["text"] for choice in whole.choices]
    assert [choice["index"] for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    # Which choice's chunk comes first is nobody's promise: each stream is looked at by itself.
    for front in paths.fronts.values():
        response = front.post(completion(PROMPT, n=3, temperature=1.0, seed=5, stream=True))
        events = [httpx.Response(200, text=line[6:]).json() for line in response.text.split("\n\n")[:-2]]
        choices = [choice for event in events for choice in event["choices"]]
        assert {choice["index"] for choice in choices} == {0, 1, 2}
        for index, text in enumerate(texts):
            own = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in own) == text
            assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]


def test_case_38_every_token_counts_once(paths: Paths) -> None:
    for count in (1, 2, 7):
        usage = paths.complete(fresh_ids(33), max_tokens=count).body["usage"]
        assert usage["completion_tokens"] == count
        assert usage["total_tokens"] == 33 + count


def test_n6_cached_tokens_are_the_same_on_every_path(paths: Paths) -> None:
    prompt = fresh_ids(70)
    first = paths.complete(prompt).body["usage"]["prompt_tokens_details"]["cached_tokens"]
    again = paths.complete(prompt).body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (first, again) == (0, 64)


# --- stops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_cases_03_05_06_a_stop_string_over_token_borders_is_cut_exactly(paths: Paths, is_streamed: bool) -> None:
    body = completion("once upon a time", max_tokens=24, logprobs=0)
    whole = paths.post(body)
    text, offsets = whole.text, whole.choices[0]["logprobs"]["text_offset"]
    # From the middle of one token to the middle of a later one.
    stops = [text[start:stop] for start in range(2, 8) for stop in (offsets[5] + 1, offsets[7])]
    for stop in (each for each in stops if each and "\ufffd" not in each):
        reply = paths.post({**body, "stop": [stop, stop + "never"], "stream": is_streamed, "logprobs": None})
        shown = joined(reply) if is_streamed else reply.text
        assert shown == text[: text.index(stop)]
        reasons = [choice["finish_reason"] for choice in (reply.streamed() if is_streamed else reply.choices)]
        assert reasons[-1] == "stop"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_case_34_the_first_token_ends_the_answer(paths: Paths, is_streamed: bool) -> None:
    prompt, eos = fresh_ids(40), {"ignore_eos": False, "logit_bias": {"2": 100}}
    for ends in (eos, {"stop_token_ids": [greedy_id(paths, prompt)]}):
        reply = paths.complete(prompt, max_tokens=9, stream=is_streamed, **ends)
        parts = reply.streamed() if is_streamed else reply.choices
        assert [(part["text"], part["finish_reason"]) for part in parts] == [("", "stop")]
        assert is_streamed or reply.body["usage"]["completion_tokens"] == 1


def greedy_id(paths: Paths, prompt: list[int]) -> int:
    """The likeliest next token: the prompt goes on with any token, whose place then shows the likeliest."""
    reply = paths.complete([*prompt, 5], max_tokens=0, prompt_logprobs=1)
    place: Json = reply.choices[0]["prompt_logprobs"][-1]
    return next(int(key) for key, value in place.items() if value["rank"] == 1)


def test_case_35_one_token_is_one_token(paths: Paths) -> None:
    reply = paths.complete(fresh_ids(40), max_tokens=1, logprobs=0)
    assert len(reply.choices[0]["logprobs"]["tokens"]) == 1
    assert reply.choices[0]["finish_reason"] == "length"
    text = paths.complete(PROMPT, max_tokens=1).text
    assert text
    stopped = paths.complete(PROMPT, max_tokens=1, stop=text)
    assert (stopped.text, stopped.choices[0]["finish_reason"]) == ("", "stop")


def test_min_tokens_holds_back_stop_tokens_and_stop_strings(paths: Paths) -> None:
    prompt = "once upon a time"
    text = paths.complete(prompt, max_tokens=12).text
    stop = next(each for each in text if each != "\ufffd")
    early = paths.complete(prompt, max_tokens=12, stop=stop)
    assert early.text == text[: text.index(stop)]
    late = paths.complete(prompt, max_tokens=12, stop=stop, min_tokens=12)
    assert (late.text, late.choices[0]["finish_reason"]) == (text, "length")


# --- log probabilities and echo -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["the lazy dog", [5, 6, 7, 8, 9]])
def test_case_09_echo_and_logprobs_in_every_combination(
    paths: Paths,
    prompt: str | list[int],
    echo: bool,
    logprobs: int | None,
    is_streamed: bool,
    tokenizer: ModelTokenizer,
) -> None:
    reply = paths.complete(prompt, echo=echo, logprobs=logprobs, stream=is_streamed)
    parts = reply.streamed() if is_streamed else reply.choices
    text = "".join(part["text"] for part in parts)
    whole = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    assert text.startswith(whole) or not echo
    lists = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    assert bool(lists) == (logprobs is not None)
    if logprobs is None:
        return
    num_prompt = len(tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns = {name: [item for each in lists for item in each[name]] for name in names}
    assert {len(column) for column in columns.values()} == {6 + num_prompt * echo}
    assert (columns["token_logprobs"][0] is None) == echo
    assert columns["text_offset"] == sorted(columns["text_offset"])
    assert all(offset <= len(text) for offset in columns["text_offset"])
    assert all(
        top is None or logprobs <= len(top) <= logprobs + 1 for top in columns["top_logprobs"][echo:] if logprobs
    )


def test_cases_10_37_the_loglikelihood_payload_is_exact_on_every_path(paths: Paths, tiny_llama: Path) -> None:
    """Batched token ids, echo, logprobs, one token more or none: as evaluation harnesses ask, against transformers."""
    from tests.parity.reference import prompt_logprobs

    prompts = [fresh_ids(count) for count in (1, 2, 17, 130, 600)]
    for max_tokens in (1, 0):
        reply = paths.complete(prompts, max_tokens=max_tokens, echo=True, logprobs=1, seed=1234)
        assert len(reply.choices) == len(prompts)
        for prompt, choice in zip(prompts, reply.choices, strict=True):
            logprobs = choice["logprobs"]
            assert len(logprobs["token_logprobs"]) == len(prompt) + max_tokens
            assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
            expected = prompt_logprobs(tiny_llama, prompt)
            found = logprobs["token_logprobs"][1 : len(prompt)]
            assert found == pytest.approx([chosen for chosen, _ in expected], abs=2e-4)
            for top, (chosen, best) in zip(logprobs["top_logprobs"][1 : len(prompt)], expected, strict=True):
                assert max(top.values()) == pytest.approx(best, abs=2e-4)
                assert (len(top) == 1) == (chosen == best)


def test_case_37_a_scored_prompt_is_scored_again_when_it_is_cached(paths: Paths) -> None:
    prompt = fresh_ids(100)
    plain = paths.complete(prompt)
    first = paths.complete(prompt, echo=True, logprobs=3)
    assert paths.complete(prompt, echo=True, logprobs=3) == first
    assert first.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first.text.endswith(plain.text)
    several = paths.complete(prompt, echo=True, logprobs=3, n=2)
    assert [choice["logprobs"] for choice in several.choices] == [first.choices[0]["logprobs"]] * 2


def test_prompt_logprobs_say_what_an_echo_says(paths: Paths) -> None:
    prompt = fresh_ids(30)
    echoed = paths.complete(prompt, echo=True, logprobs=2, max_tokens=1).choices[0]["logprobs"]
    places = paths.complete(prompt, prompt_logprobs=2, max_tokens=1).choices[0]["prompt_logprobs"]
    assert places[0] is None
    assert [place[str(token)]["logprob"] for place, token in zip(places[1:], prompt[1:], strict=True)] == echoed[
        "token_logprobs"
    ][1:30]
    chat = paths.chat("hello world", prompt_logprobs=1)
    assert len(chat.body["prompt_logprobs"]) == chat.body["usage"]["prompt_tokens"]


def test_case_36_the_first_tokens_logprobs_travel_with_it(paths: Paths) -> None:
    reply = paths.chat("hello", logprobs=True, top_logprobs=3, ignore_eos=True)
    content = reply.choices[0]["logprobs"]["content"]
    assert len(content) == 6
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)


def test_case_07_a_character_over_two_tokens_is_whole(paths: Paths, tokenizer: ModelTokenizer) -> None:
    first, second = (next(i for i in range(TINY_VOCAB) if tokenizer.token_bytes(i) == bytes([b])) for b in "ď".encode())
    prompt = [*tokenizer.encode("the "), first]
    for is_streamed in (False, True):
        reply = paths.complete(prompt, echo=True, max_tokens=1, logit_bias={str(second): 100}, stream=is_streamed)
        assert (joined(reply) if is_streamed else reply.text) == "the ď"


# --- lengths --------------------------------------------------------------------------------------------------------


def test_case_12_null_is_up_to_the_context_and_zero_is_the_prompt_only(paths: Paths) -> None:
    for reply in (paths.chat("hi", max_tokens=None, ignore_eos=True), paths.complete(PROMPT, max_tokens=None)):
        assert reply.body["usage"]["total_tokens"] == TINY_CONTEXT
        assert reply.choices[0]["finish_reason"] == "length"
    echo = paths.complete(PROMPT, echo=True, max_tokens=0)
    assert (echo.text, echo.choices[0]["finish_reason"]) == (PROMPT, "length")
    assert echo.body["usage"]["completion_tokens"] == 0
    full = paths.complete([5] * TINY_CONTEXT, echo=True, max_tokens=0, logprobs=1)
    assert full.body["usage"]["total_tokens"] == len(full.choices[0]["logprobs"]["tokens"]) == TINY_CONTEXT
    for more in ({"max_tokens": 1}, {"prompt": [5] * (TINY_CONTEXT + 1)}):
        reply = paths.post({**completion([5] * TINY_CONTEXT, echo=True, max_tokens=0), **more})
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def test_case_13_max_tokens_left_out(paths: Paths) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "ignore_eos": True}
    assert paths.post(body).body["usage"]["completion_tokens"] == 16
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    assert paths.post(body, "/v1/chat/completions").status == httpx.codes.OK


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_case_14_an_empty_prompt_is_refused(paths: Paths, prompt: object) -> None:
    reply = paths.post(completion(prompt))
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "prompt", "empty_prompt")
    assert paths.complete(PROMPT).status == httpx.codes.OK


def test_case_15_a_flat_list_of_ids_is_one_prompt(paths: Paths) -> None:
    flat = paths.complete([5, 6, 7])
    assert len(flat.choices) == 1
    both = paths.complete([[5, 6, 7], [8, 9]])
    assert [choice["index"] for choice in both.choices] == [0, 1]
    assert both.choices[0]["text"] == flat.text


@pytest.mark.parametrize("field", [{"logit_bias": {"9999": 1}}, {"stop_token_ids": [9999]}, {"stop_token_ids": [-1]}])
def test_case_17_ids_outside_the_vocabulary_are_refused(paths: Paths, field: Json) -> None:
    reply = paths.post(completion(PROMPT, **field))
    assert (reply.status, reply.error["param"]) == (400, next(iter(field)))
    assert paths.complete(PROMPT).status == httpx.codes.OK


@pytest.mark.parametrize("is_streamed", [False, True])
def test_cases_18_19_a_prompt_over_the_context_is_refused_by_its_length(paths: Paths, is_streamed: bool) -> None:
    reply = paths.post(completion([5] * (TINY_CONTEXT + 100), stream=is_streamed, max_tokens=None))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert str(TINY_CONTEXT) in reply.error["message"]
    assert str(TINY_CONTEXT + 100) in reply.error["message"]
    assert "max_tokens" not in reply.error["message"]


# --- refusals and ends ----------------------------------------------------------------------------------------------


def test_case_20_a_body_that_is_no_json(paths: Paths) -> None:
    for front in paths.fronts.values():
        response = front.client.post("/v1/chat/completions", content=b"{nonsense")
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_case_26_an_unknown_model(paths: Paths) -> None:
    reply = paths.post(completion(PROMPT, model="gpt-9"))
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


# --- forms of answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "schema": {"type": "object"}},  # case 22: at the wrong level
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "not-a-type"}}},  # case 23
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": ""},  # case 24
        {"type": "json_schema", "json_schema": {"name": "n", "schema": ""}},
        {"type": "json_object", "schema": False},
    ],
)
def test_cases_22_23_24_what_nothing_can_follow_is_refused_and_harms_nobody(
    paths: Paths, form: Json, is_streamed: bool
) -> None:
    more = {"stream": True} if is_streamed else {}
    reply = paths.chat("hello", response_format=form, **more)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["message"]
    assert reply.error["param"].startswith("response_format")
    assert paths.chat("hello").status == httpx.codes.OK


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "f"}}, "stop"), ("none", "length")],
)
def test_case_30_finish_reasons_of_calls(paths: Paths, choice: object, reason: str, is_streamed: bool) -> None:
    more = {"stream": True} if is_streamed else {}
    asked = {"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False, **more}
    # As many tokens as a call needs where one is enforced, and an answer that would not end by itself where none is.
    length = {"max_tokens": 6, "ignore_eos": True} if choice == "none" else {"max_tokens": 120}
    reply = paths.chat("hi", tool_choice=choice, temperature=1.0, seed=4, **length, **asked)
    assert reply.status == httpx.codes.OK, reply
    parts = reply.streamed() if is_streamed else reply.choices
    lists = [part["delta" if is_streamed else "message"].get("tool_calls") for part in parts]
    assert [] not in lists
    functions = [call["function"] for calls in lists if calls for call in calls]
    assert [each["name"] for each in functions if "name" in each] == ([] if choice == "none" else ["f"])
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [reason]


def test_case_27_a_client_that_goes_frees_everything(paths: Paths) -> None:
    for name, front in paths.fronts.items():
        with front.client.stream(
            "POST", "/v1/completions", json=completion(PROMPT, max_tokens=500, stream=True)
        ) as got:
            next(got.iter_lines())
        front.wait_idle(1 if name == "mixed" else 2)


def test_case_44_no_prompt_is_read_twice(paths: Paths) -> None:
    front = paths.fronts["disaggregated"]
    before = front.wait_counted()  # nothing of earlier tests is still to be reported
    paths.complete(fresh_ids(90))
    placed = front.readings().since(before).total(table.PLACEMENTS)
    seen = front.settled({"decode": placed, "prefill": placed}, before)
    assert seen.total(table.PROMPT_TOKENS_COMPUTED, role="decode") == 0
    assert seen.total(table.PROMPT_TOKENS_RECEIVED) == 90


def test_n8_a_seed_gives_the_same_everywhere(paths: Paths) -> None:
    first = paths.complete(PROMPT, temperature=1.0, seed=11, max_tokens=20)
    other = paths.complete(PROMPT, temperature=1.0, seed=12, max_tokens=20)
    assert first.text != other.text


def test_routing_fields_of_clients_are_not_obeyed(paths: Paths) -> None:
    plain = paths.complete(PROMPT)
    routed = paths.complete(
        PROMPT,
        priority=100,
        kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.0.0.1"},
        bootstrap_host="10.0.0.1",
        bootstrap_room=7,
        data_parallel_rank=3,
        cache_salt="other",
    )
    assert routed.text == plain.text
