"""The live service behind the HTTP front, and workers that register with it over loopback."""

import asyncio
import contextlib
import json
from typing import Any

import msgspec
import pytest
from tests.unit.worker.rigs import DEADLINE_S, gone, layout, site, until
from tests.unit.worker.router_rigs import (
    DECODER,
    ask,
    is_ready,
    linked,
    mixed_card,
    read,
    receive,
    register,
    service,
    token,
)

from disagg.channel.channel import dial
from disagg.core.errors import ConfigurationError, FailureKind, PeerLost, Unavailable
from disagg.core.ids import HandoffId, SequenceId
from disagg.core.request import FinishReason, SamplingParams
from disagg.core.roles import Role
from disagg.dispatch.stream import GenerateRequest, RequestFailed, TokensDelivered
from disagg.protocol.messages import (
    AbortSequence,
    AnnouncePeers,
    EmitTokens,
    PromptReport,
    ReportState,
    StartSequence,
    WorkerState,
)
from disagg.testing.engine import expected_tokens

pytestmark = pytest.mark.usefixtures("no_socket_left")


# --- real workers ------------------------------------------------------------------------------------------------


async def test_two_workers_register_pair_and_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "disagg.worker.links")
    async with service() as (served, address), site("p", Role.PREFILL) as one, site("d", Role.DECODE) as other:
        assert served.models()[0].missing == "no worker has registered"
        async with linked(one, address), linked(other, address):
            await until(lambda: is_ready(served))
            request = GenerateRequest("fake", tuple(range(50)), SamplingParams(8, temperature=0.0))
            stream = served.submit(request)
            answers = [event for event in await read(stream) if isinstance(event, TokensDelivered)]
            ids = [each.token_id for event in answers for each in event.tokens]
            expected = expected_tokens(layout(), SequenceId(stream.request_id, 0), request.prompt_ids, request.sampling)
            assert ids == expected
            assert answers[-1].finish_reason is FinishReason.LENGTH
            whose = str(stream.request_id).partition("-")[0]  # what names of its requests begin with
            assert caplog.messages.count(f"registered with router {whose} at {address}") == 2
            await one.settled()
            await other.settled()
            cluster = json.loads(served.cluster_json())
            assert {each["worker_id"]: each["partners"] for each in cluster["workers"]} == {"p": ["d"], "d": []}
        await until(lambda: not is_ready(served))


async def test_what_one_step_brings_is_read_at_once_and_a_failure_by_itself() -> None:
    async with service() as (served, address):
        channel, _ = await register(address, mixed_card())
        stream = ask(served, max_tokens=5, num_choices=3)
        await receive(channel, StartSequence)
        channel.send(EmitTokens(tuple(token(stream, 0, choice) for choice in (2, 0, 1))))
        reading = aiter(stream.events())
        async with asyncio.timeout(DEADLINE_S):
            first = await anext(reading)
        ready = stream.take_ready()
        assert [event.choice for event in (first, *ready) if isinstance(event, TokensDelivered)] == [2, 0, 1]
        assert stream.take_ready() == []
        channel.send(EmitTokens((token(stream, 1, 0), token(stream, 1, 1))))
        await until(lambda: len(stream._events) == 2)  # type: ignore[attr-defined]
        await served.close()  # fails what is open
        assert len(stream.take_ready()) == 2
        assert stream.take_ready() == []
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(await anext(reading), RequestFailed)
        await channel.close()


@pytest.mark.parametrize("roles", [(Role.MIXED,), (Role.PREFILL, Role.DECODE)])
async def test_scores_of_a_prompt_come_once_with_the_first_token(roles: tuple[Role, ...]) -> None:
    """Over several chunks, and whole again when the prompt's blocks are cached by then."""
    async with contextlib.AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(service())
        for role in roles:
            made = await stack.enter_async_context(site(role.value, role))
            await stack.enter_async_context(linked(made, address))
        await until(lambda: is_ready(served))
        sampling = SamplingParams(3, temperature=0.0, num_prompt_logprobs=0)
        request = GenerateRequest("fake", tuple(range(50)), sampling, num_choices=2)
        for _ in range(2):
            stream = served.submit(request)
            answers = [event for event in await read(stream) if isinstance(event, TokensDelivered)]
            found = [(event.choice, token) for event in answers for token in event.tokens]
            scored = [(choice, token.position) for choice, token in found if token.prompt_logprobs is not None]
            assert scored == [(0, 0)]
            (scores,) = (token.prompt_logprobs for _, token in found if token.prompt_logprobs is not None)
            assert [each.chosen for each in scores] == [-float(token_id) for token_id in range(1, 50)]
            assert stream.num_cached_tokens == 0
            assert len(found) == 6


async def test_a_worker_finds_a_router_that_comes_late_and_one_that_comes_back(free_port: int) -> None:
    async with site("m", Role.MIXED) as made, linked(made, f"127.0.0.1:{free_port}"):
        for _ in range(2):
            async with service(free_port) as (served, _):
                await until(lambda served=served: is_ready(served))  # type: ignore[misc]
                assert await read(ask(served))


async def test_a_router_that_goes_takes_its_sequences_with_it() -> None:
    async with site("m", Role.MIXED) as made, service() as (served, address), linked(made, address):
        await until(lambda: is_ready(served))
        stream = ask(served, max_tokens=200)
        await anext(aiter(stream.events()))
        await served.close()
        await until(lambda: made.worker._send_to_router is None)
        await made.settled()


async def test_a_refusal_for_good_ends_the_worker_with_its_reason() -> None:
    async with service() as (_, address), site("m", Role.MIXED) as made:
        made.peers.card = msgspec.structs.replace(
            made.peers.card, pool=msgspec.structs.replace(made.peers.card.pool, tokenizer_digest="another")
        )
        async with linked(made, address) as task:
            await asyncio.wait([task], timeout=DEADLINE_S)
            with pytest.raises(ConfigurationError, match="digest another is not tok"):
                task.result()


async def test_an_id_that_is_taken_is_tried_again_until_it_is_free() -> None:
    async with service() as (served, address), site("m0", Role.MIXED) as made:
        squatter, _ = await register(address, mixed_card())
        async with linked(made, address) as task:
            await asyncio.wait([task], timeout=0.3)
            assert not task.done()
            await squatter.close()
            await until(lambda: made.worker._send_to_router is not None)
            assert is_ready(served)


# --- workers played by the test ----------------------------------------------------------------------------------


async def test_a_stream_outlives_its_worker_and_goes_on_with_the_next() -> None:
    async with service() as (served, address):
        channel, _ = await register(address, mixed_card())
        await until(lambda: is_ready(served))
        stream = ask(served, max_tokens=2)
        channel.send(EmitTokens((token(stream, 0),)))
        reading = aiter(stream.events())
        assert isinstance(await anext(reading), TokensDelivered)
        await channel.close()
        await until(lambda: not is_ready(served))
        waiting = ask(served, max_tokens=1)  # what was ready once is waited for
        again, _ = await register(address, mixed_card(incarnation=2))
        started = await receive(again, StartSequence)
        assert isinstance(started, StartSequence)
        assert (started.spec.sequence_id, started.attempt) == (SequenceId(stream.request_id, 0), 2)
        assert started.emitted_ids == (9,)
        again.send(EmitTokens((token(stream, 1), token(waiting, 0))))
        last = await anext(reading)
        assert isinstance(last, TokensDelivered)
        assert (last.tokens[0].position, last.finish_reason) == (1, FinishReason.LENGTH)
        assert len(await read(waiting)) == 1
        await again.close()


async def test_a_stream_that_no_worker_takes_fails_with_both_reasons() -> None:
    async with service(max_unplaced_s=0.1) as (served, address):
        channel, _ = await register(address, mixed_card())
        await until(lambda: is_ready(served))
        stream = ask(served)
        channel.send(EmitTokens((token(stream, 0),)))
        await receive(channel, StartSequence)
        await channel.close()
        first, last = await read(stream)
        assert isinstance(first, TokensDelivered)
        assert isinstance(last, RequestFailed)
        assert isinstance(last.error, Unavailable)
        for text in ("m0", "its connection ended", "for 0.1 s", "no worker has registered"):
            assert text in str(last.error)
        assert served._streams == {}


@pytest.mark.parametrize("how", ["abort", "finish_choice"])
async def test_a_reader_that_leaves_has_its_sequences_aborted(how: str) -> None:
    async with service() as (served, address):
        channel, _ = await register(address, mixed_card())
        await until(lambda: is_ready(served))
        stream = ask(served)
        if how == "abort":
            stream.abort()
            stream.abort()
        else:
            channel.send(EmitTokens((token(stream, 0),)))
            await anext(aiter(stream.events()))
            stream.finish_choice(0)
        aborted = await receive(channel, AbortSequence)
        assert isinstance(aborted, AbortSequence)
        assert aborted.sequence_id == SequenceId(stream.request_id, 0)
        assert await read(stream) == []
        assert served._streams == {}
        await channel.close()


async def test_what_a_worker_has_learned_is_shown_by_name() -> None:
    """Also of one whose steps cost something that this router has no name for."""
    async with service() as (served, address):
        channel, _ = await register(address, mixed_card())
        channel.send(ReportState(WorkerState(num_free_blocks=3, step_costs=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0))))

        def state() -> dict[str, Any]:
            (worker,) = json.loads(served.cluster_json())["workers"]
            return dict(worker["state"])

        await until(lambda: state()["num_free_blocks"] == 3)
        costs = {"base_s": 1.0, "prompt_token_s": 2.0, "prompt_pair_s": 3.0, "stream_s": 4.0, "context_token_s": 5.0}
        assert state()["step_costs"] == costs
        await channel.close()


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_cached_tokens_are_known_at_the_end(max_tokens: int) -> None:
    """Also when the only token comes with the report, in the message that ends the request."""
    async with service() as (served, address):
        channel, _ = await register(address, mixed_card())
        await until(lambda: is_ready(served))
        stream = ask(served, max_tokens=max_tokens)
        report = PromptReport(HandoffId(SequenceId(stream.request_id, 0), 1), 2, 1)
        channel.send(EmitTokens((token(stream, 0),), (report,)))
        channel.send(EmitTokens((token(stream, 1),)))
        await read(stream)
        assert stream.num_cached_tokens == 2
        await channel.close()


async def test_the_last_tokens_of_all_choices_may_come_in_one_message() -> None:
    async with service() as (served, address):
        channel, _ = await register(address, mixed_card())
        await until(lambda: is_ready(served))
        stream = ask(served, max_tokens=1, num_choices=3)
        channel.send(EmitTokens(tuple(token(stream, 0, choice) for choice in range(3))))
        answers = [event for event in await read(stream) if isinstance(event, TokensDelivered)]
        assert {event.choice: event.finish_reason for event in answers} == dict.fromkeys(range(3), FinishReason.LENGTH)
        assert served._streams == {}
        await channel.close()


async def test_closing_the_service_fails_what_is_open() -> None:
    async with service() as (served, address):
        channel, _ = await register(address, mixed_card())
        await until(lambda: is_ready(served))
        stream = ask(served)
        await served.close()
        (event,) = await read(stream)
        assert isinstance(event, RequestFailed)
        assert isinstance(event.error, Unavailable)
        await channel.close()


async def test_a_refused_worker_hears_why_and_is_let_go() -> None:
    async with service() as (served, address):
        channel, answer = await register(address, mixed_card(tokenizer="another"))
        assert answer.failure is not None
        assert answer.failure.kind is FailureKind.INVALID_REQUEST
        with pytest.raises(PeerLost):
            await channel.receive(DEADLINE_S)
        await channel.close()
        assert not is_ready(served)


@pytest.mark.parametrize("first", [ReportState(WorkerState()), b"hello"])
async def test_who_does_not_register_is_sent_away(first: object) -> None:
    async with service() as (served, address):
        channel = await dial(address, DECODER, timeout_s=DEADLINE_S)
        channel.send(first)
        with pytest.raises(PeerLost):
            await channel.receive(DEADLINE_S)
        await channel.close()
        assert served.models()[0].missing == "no worker has registered"


async def test_a_worker_that_registers_again_is_served_by_its_new_connection() -> None:
    """It saw its loss before the router did: the old connection's end must not take the new one with it."""
    async with service() as (served, address):
        old, _ = await register(address, mixed_card())
        await until(lambda: is_ready(served))
        new, answer = await register(address, mixed_card())
        assert answer.failure is None
        await old.close()
        await asyncio.sleep(0.05)
        assert is_ready(served)
        stream = ask(served, max_tokens=1)
        started = await receive(new, StartSequence)
        assert isinstance(started, StartSequence)
        new.send(EmitTokens((token(stream, 0),)))
        assert len(await read(stream)) == 1
        await new.close()


async def test_a_connection_that_was_replaced_is_closed() -> None:
    async with service(beat_interval_s=4 * DEADLINE_S) as (served, address):  # by its silence it would be much later
        old, _ = await register(address, mixed_card())
        await until(lambda: is_ready(served))
        new, _ = await register(address, mixed_card())
        await receive(new, AnnouncePeers)
        try:
            await gone(old)
        finally:
            await old.close()
            await new.close()
