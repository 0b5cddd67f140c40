"""The client and the loop against a server whose delays and failures are known."""

import asyncio
import random
import time

import msgspec

from disagg.bench.arrivals import EvenArrivals
from disagg.bench.client import Api, OpenAiClient, find_model
from disagg.bench.http_client import HttpClient
from disagg.bench.load import LoadLimits, LoadLoop
from disagg.bench.prompts import PromptSource
from disagg.bench.record import Lapse, RequestRecord
from disagg.bench.workload import ClosedWork, Lengths, RandomWork, SessionWork, Workload, WorkRequest
from disagg.testing.openai_server import Delays, FakeOpenAiServer

NO_LIMITS = LoadLimits()


def work(num: int, rate_per_s: float = 200.0, tokens: int = 4) -> RandomWork:
    return RandomWork(num_requests=num, arrivals=EvenArrivals(rate_per_s), prompt=Lengths(12), output=Lengths(tokens))


async def load(
    workload: Workload,
    delays: Delays,
    *,
    api: Api = Api.TEXT,
    timeout_s: float = 20.0,
    limits: LoadLimits = NO_LIMITS,
) -> tuple[list[RequestRecord], FakeOpenAiServer]:
    async with FakeOpenAiServer(delays) as server, HttpClient(server.url) as http:
        prompts = PromptSource(1, ids=range(5, 50))
        client = OpenAiClient(http, prompts, api=api, model=await find_model(http), timeout_s=timeout_s)
        loop = LoadLoop(client, limits)
        records = await loop.run(workload, random.Random(1))
        for each in (loop, http, server):
            each.check_invariants()
        assert loop.num_open == 0
        return records, server


async def test_tokens_are_stamped_when_they_come_and_counts_are_the_servers() -> None:
    records, server = await load(work(20), Delays(0.05, 0.02), api=Api.IDS)
    assert [record.number for record in records] == list(range(20))
    for record in records:
        assert record.lapse is None, record.detail
        assert (record.num_prompt_tokens, record.num_output_tokens, len(record.token_s)) == (12, 4, 4)
        assert record.ttft_s >= 0.0499  # never early; late as this machine is busy
        assert record.token_s[-1] - record.due_s >= 0.0499 + 3 * 0.02
        assert list(record.token_s) == sorted(record.token_s)
        assert record.sent_s >= record.due_s
    assert server.num_requests == 20
    assert server.most_open > 5  # open loop: nobody waited for an answer


async def test_a_closed_loop_has_so_many_open_and_no_more() -> None:
    records, server = await load(ClosedWork(work(30), 3), Delays(0.01, 0.002))
    assert (len(records), server.most_open) == (30, 3)


async def test_what_fails_is_recorded_by_kind_and_nothing_is_lost() -> None:
    records, _ = await load(work(30), Delays(0.005, 0.002, fail_every=5, break_every=7))
    kinds = [record.lapse for record in records]
    assert kinds.count(Lapse.REFUSED) == 6
    assert kinds.count(Lapse.CONNECTION) == 4  # every seventh of thirty
    assert kinds.count(None) == 20
    assert all("503" in record.detail for record in records if record.lapse is Lapse.REFUSED)


async def test_a_deadline_and_a_limit_end_what_does_not_end() -> None:
    records, _ = await load(work(6), Delays(30.0), timeout_s=1.0, limits=LoadLimits(max_open=4))
    kinds = [record.lapse for record in records]
    assert kinds.count(Lapse.NOT_SENT) == 2
    assert kinds.count(Lapse.TIMEOUT) == 4


async def test_nothing_is_sent_after_the_end_and_warm_up_is_marked() -> None:
    records, server = await load(work(100, 100.0), Delays(0.0, 0.0), limits=LoadLimits(max_s=0.2, warm_up_requests=5))
    assert 6 <= len(records) <= 21  # those that a busy machine holds up until the end are not sent
    assert len(records) == server.num_requests
    assert [record.is_warm_up for record in records] == [True] * 5 + [False] * (len(records) - 5)


async def test_turns_of_a_conversation_carry_the_answers_so_far() -> None:
    sessions = SessionWork(
        num_sessions=2,
        arrivals=EvenArrivals(50.0),
        num_turns=Lengths(3),
        message=Lengths(5),
        output=Lengths(4),
        think_s=0.01,
    )
    records, server = await load(sessions, Delays(0.005, 0.001), api=Api.CHAT)
    assert len(records) == 2 * 3
    bodies = [msgspec.json.decode(body) for body in server.bodies]
    longest = max(bodies, key=lambda body: len(body["messages"]))
    assert [each["role"] for each in longest["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert longest["messages"][1]["content"] == "wwww"


async def test_a_server_that_is_not_there_is_a_failure_of_each_request() -> None:
    async with HttpClient("http://127.0.0.1:9") as http:
        client = OpenAiClient(http, PromptSource(1), api=Api.TEXT, model="m", timeout_s=5.0)
        records = await LoadLoop(client, LoadLimits()).run(work(3), random.Random(1))
    assert [record.lapse for record in records] == [Lapse.CONNECTION] * 3


async def test_servers_that_refuse_unknown_fields_are_not_sent_any() -> None:
    async with FakeOpenAiServer(Delays(0.0, 0.0)) as server, HttpClient(server.url) as http:
        for ignore_eos in (True, False):
            source = PromptSource(1)
            client = OpenAiClient(http, source, api=Api.TEXT, model="m", timeout_s=20.0, ignore_eos=ignore_eos)
            await LoadLoop(client, NO_LIMITS).run(work(1), random.Random(1))
    assert [msgspec.json.decode(body).get("ignore_eos") for body in server.bodies] == [True, None]


class StuckClient:
    """Holds up the whole loop at its first request, as a slow client would."""

    def __init__(self) -> None:
        self.num = 0

    def prepare(self, request: WorkRequest) -> bytes:
        return b""

    async def ask(self, request: WorkRequest, content: bytes, start_s: float) -> RequestRecord:
        self.num += 1
        if self.num == 1:
            time.sleep(0.3)  # noqa: ASYNC251 - the fault that is tested
        now_s = time.perf_counter() - start_s
        return RequestRecord(
            number=request.number, due_s=request.due_s, sent_s=now_s, end_s=now_s, token_s=(now_s,), num_prompt_tokens=1
        )


async def test_a_client_that_falls_behind_makes_latencies_worse_and_hides_nothing() -> None:
    records = await LoadLoop(StuckClient(), LoadLimits()).run(work(20, 100.0), random.Random(1))
    late = [record.ttft_s for record in records if record.due_s < 0.15]
    assert len(late) >= 15
    assert min(late) > 0.1  # those due meanwhile count the wait, though they were sent later
    await asyncio.sleep(0)
