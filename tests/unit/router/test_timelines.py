"""Timelines as clients ask for them: in their answer, and afterwards."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.router.site import MakeSite, Site, listening
from tests.unit.router.test_answers import chunks_of, says
from tests.unit.router.test_slow_clients import DEADLINE_S

from disagg.core.errors import Unavailable
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.access import Access, AccessKey
from disagg.router.connection import DEFAULT_CONNECTION_LIMITS
from disagg.router.timing import Timing
from disagg.testing.generation import Script

WANTED = {"X-Disagg-Timeline": "1"}
WORDS = ((40, 41, 42, 43),)
Post = Callable[..., Any]


@pytest.fixture
def keeping(make_site: MakeSite) -> Site:
    return make_site(lambda request: Script(WORDS), timing=Timing(3, lambda: 1e9))


async def ask(
    site: Site, path: str = "/v1/completions", headers: dict[str, str] | None = None, **fields: object
) -> Any:
    body: dict[str, object] = {"model": "tiny", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    return await site.client.post(path, json={**body, **fields}, headers=headers or {})


def check(timeline: dict[str, Any], num_choices: int = 1) -> None:
    assert (timeline["model"], len(timeline["choices"])) == ("tiny", num_choices)
    for choice in timeline["choices"]:
        stages = choice["stages"]
        assert [stage["stage"] for stage in stages][:3] == ["receive", "router_queue", "tokenise"]
        assert sum(stage["seconds"] for stage in stages) == pytest.approx(choice["total_s"], abs=1e-6)
        ttft = sum(stage["seconds"] for stage in stages if stage["part"] == "ttft")
        assert ttft == pytest.approx(choice["ttft_s"], abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_whole_answer_shows_it_where_the_client_asks(make_site: MakeSite, path: str) -> None:
    """Also on a server that keeps none."""
    site = make_site(lambda request: Script(WORDS))
    plain, shown = (await ask(site, path)).json(), (await ask(site, path, WANTED)).json()
    assert "disagg" not in plain
    (timeline,) = shown.pop("disagg")["timelines"]
    check(timeline)
    assert shown["id"].endswith(timeline["request_id"])
    assert shown.keys() == plain.keys()
    assert [stream.is_timed for stream in site.service.streams] == [False, True]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("has_usage", [False, True])
async def test_a_stream_shows_it_in_its_last_chunk(keeping: Site, path: str, has_usage: bool) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": has_usage}}
    plain, shown = (
        chunks_of(await ask(keeping, path, **options)),
        chunks_of(await ask(keeping, path, WANTED, **options)),
    )
    assert not any("disagg" in chunk for chunk in [*plain, *shown[:-1]])
    last = shown[-1]
    assert (last["choices"], "usage" in last) == ([], has_usage)
    (timeline,) = last["disagg"]["timelines"]
    check(timeline)
    (choice,) = timeline["choices"]
    assert choice["first_gap_s"] is not None
    assert {stage["stage"] for stage in choice["stages"] if stage["part"] == "ttft"} >= {"write"}
    assert len(shown) == len(plain) + (not has_usage)


async def test_each_prompt_has_a_timeline_and_each_choice_its_own_stages(keeping: Site) -> None:
    answer = (await ask(keeping, headers=WANTED, prompt=["hi", "there"], n=2)).json()
    first, second = answer["disagg"]["timelines"]
    check(first, 2)
    check(second, 2)
    assert first["request_id"] != second["request_id"]


@pytest.mark.parametrize("value", ["yes", "2", "", "true"])
async def test_a_header_that_makes_no_sense_is_refused(site: Site, value: str) -> None:
    response = await ask(site, headers={"X-Disagg-Timeline": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Disagg-Timeline"
    assert (await ask(site, headers={"X-Disagg-Timeline": "0"})).status_code == 200


async def test_the_last_ones_are_kept_for_later(keeping: Site) -> None:
    ids = [(await ask(keeping, stream=False)).json()["id"] for _ in range(5)]
    found = (await keeping.client.get("/timeline")).json()["timelines"]
    assert [f"cmpl-{each['request_id']}" for each in found] == ids[:1:-1]
    assert len((await keeping.client.get("/timeline?last=2")).json()["timelines"]) == 2
    for name in (ids[-1], ids[-1].removeprefix("cmpl-")):
        (one,) = (await keeping.client.get(f"/timeline/{name}")).json()["timelines"]
        check(one)
    gone = await keeping.client.get(f"/timeline/{ids[0]}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "timeline_not_kept")


@pytest.mark.parametrize("last", ["0", "-1", "1001", "x", "1e3", "9" * 5000])
async def test_how_many_is_a_number_within_limits(keeping: Site, last: str) -> None:
    response = await keeping.client.get(f"/timeline?last={last}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "last")


async def test_failures_and_clients_that_go_are_kept_too(make_site: MakeSite) -> None:
    failure = Unavailable("no workers", retry_after_s=1.0)
    site = make_site(lambda request: Script(WORDS, failure=failure, failure_after=2), timing=Timing(9, lambda: 1e9))
    assert (await ask(site)).status_code == 503
    await ask(site, stream=True)
    refusing = make_site(lambda request: Script(refusal=failure), timing=Timing(9, lambda: 1e9))
    assert (await ask(refusing)).status_code == 503
    assert len((await site.client.get("/timeline")).json()["timelines"]) == 2
    assert (await refusing.client.get("/timeline")).json()["timelines"] == []


async def test_a_key_shows_its_own_requests_only(make_site: MakeSite) -> None:
    keys = [AccessKey(key=f"sk-0123456-{name}", name=name) for name in "ab"]
    site = make_site(lambda request: Script(WORDS), access=Access(keys), timing=Timing(9, lambda: 1e9))
    one, other = ({"Authorization": f"Bearer {key.key}"} for key in keys)
    answer = (await ask(site, headers=one)).json()
    assert len((await site.client.get("/timeline", headers=one)).json()["timelines"]) == 1
    assert (await site.client.get("/timeline", headers=other)).json()["timelines"] == []
    assert (await site.client.get(f"/timeline/{answer['id']}", headers=one)).status_code == 200
    assert (await site.client.get(f"/timeline/{answer['id']}", headers=other)).status_code == 404
    assert (await site.client.get("/timeline")).status_code == 401


async def test_each_names_the_slo_class_that_its_request_is_measured_under(make_site: MakeSite) -> None:
    key = AccessKey(key="sk-0123456-a", name="a", slo_class="chat", slo_classes=("batch",))
    site = make_site(lambda request: Script(WORDS), access=Access([key]), timing=Timing(9, lambda: 1e9))
    own = {"Authorization": f"Bearer {key.key}"}
    asked: list[dict[str, str]] = [{}, {"X-SLO-Class": "batch"}]
    for headers in asked:
        assert (await ask(site, headers={**own, **headers})).status_code == 200
    kept = (await site.client.get("/timeline", headers=own)).json()["timelines"]
    assert [timeline["slo_class"] for timeline in kept] == ["batch", "chat"]  # newest first


WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("path", "said", "fields", "is_held"),
    [
        ("/v1/completions", "hello there", {}, False),
        ("/v1/completions", "hello there", {"stop": ["xyz"]}, False),
        ("/v1/completions", "hello there", {"stop": ["hello world"]}, True),
        ("/v1/completions", "\N{UPSIDE-DOWN FACE}!", {}, True),
        ("/v1/chat/completions", "hello there", {"tools": [WEATHER]}, False),
        ("/v1/chat/completions", "<tool> is a word", {"tools": [WEATHER]}, True),
    ],
)
async def test_text_that_must_wait_for_later_tokens_is_held(
    make_site: MakeSite, tokenizer: ModelTokenizer, path: str, said: str, fields: dict[str, Any], is_held: bool
) -> None:
    site = make_site(lambda request: says(tokenizer, said))
    last = chunks_of(await ask(site, path, WANTED, stream=True, max_tokens=50, **fields))[-1]
    ((choice,),) = (timeline["choices"] for timeline in last["disagg"]["timelines"])
    stages = [(stage["part"], stage["stage"]) for stage in choice["stages"]]
    assert ("ttft", "write") in stages
    assert (("ttft", "held") in stages) == is_held
    assert (("first_gap", "held") in stages) == is_held


@pytest.mark.parametrize("is_wanted", [0, 1])
async def test_a_request_begins_with_its_first_byte(make_site: MakeSite, is_wanted: int) -> None:
    """Also where the body comes much later, and whether or not anybody wants its timeline."""
    site = make_site(lambda request: Script(WORDS))
    body, wait_s = b'{"model":"tiny","prompt":"hi"}', 0.2
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Disagg-Timeline: %d\r\n" % is_wanted
    async with asyncio.timeout(DEADLINE_S), listening(site.app, DEFAULT_CONNECTION_LIMITS) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        start_s = time.monotonic()
        writer.write(b"%bContent-Length: %d\r\n\r\n" % (head, len(body)))
        for _ in range(20):  # however late this loop is, it turns so often: the server has seen the head by then
            await asyncio.sleep(wait_s / 20)
        body_s = time.monotonic()
        writer.write(body)
        answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        took_s = time.monotonic() - start_s
        writer.close()
        await writer.wait_closed()
    (received_s,) = site.service.received_s
    assert received_s is not None
    assert start_s <= received_s < body_s
    assert ("disagg" in answer) == bool(is_wanted)
    for timeline in answer.get("disagg", {"timelines": ()})["timelines"]:
        (choice,) = timeline["choices"]
        receive_s = sum(stage["seconds"] for stage in choice["stages"] if stage["stage"] == "receive")
        assert body_s - received_s < receive_s < choice["ttft_s"] < took_s
