"""Two workers meet over loopback, hand sequences over for real, and meet again after every kind of loss."""

import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.worker.rigs import DEADLINE_S, Site, gone, layout, meet, sequence_id, site, until

from disagg.channel.channel import Channel, dial
from disagg.cluster.authority import make_keys
from disagg.core.errors import ConfigurationError, FailureKind, PeerLost
from disagg.core.ids import Incarnation, WorkerId
from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.protocol.messages import (
    AbortSequence,
    AnswerPairing,
    AnswerReservation,
    Beat,
    CancelHandoff,
    RequestPairing,
    RequestReservation,
    StartSequence,
    WorkerToWorker,
)
from disagg.scheduler.events import RouterMessageReceived
from disagg.telemetry.metrics import HANDOFF_BYTES, PROMPT_TOKENS_RECEIVED
from disagg.testing.engine import expected_tokens

pytestmark = pytest.mark.usefixtures("no_socket_left")

DECODER: msgspec.msgpack.Decoder[WorkerToWorker] = msgspec.msgpack.Decoder(WorkerToWorker)
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0)


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((31 * number + 7 * index) % 900 for index in range(length))


def moved(source: Site, target: Site) -> tuple[float, float]:
    """Bytes that the one has sent so far, and prompt tokens whose KV has come to the other."""
    sent, received = (each.worker.scheduler.counters for each in (source, target))
    return sum(sent.get(HANDOFF_BYTES, label) for label in ("hidden", "visible")), received.get(PROMPT_TOKENS_RECEIVED)


async def hand_over(source: Site, target: Site, numbers: range, sampling: SamplingParams = SAMPLING) -> None:
    """Start sequences on both sides and check every token at both."""
    before = moved(source, target)
    lengths = {number: 3 + (number * 13) % 40 for number in numbers}
    for number, length in lengths.items():
        target.start(number, Task.DECODE, source, prompt(number, length), sampling)
        source.start(number, Task.PREFILL, target, prompt(number, length), sampling)
    await target.until(lambda: all(target.has_answered(number) for number in numbers) or bool(target.failures))
    assert target.failures == []
    for number, length in lengths.items():
        expected = expected_tokens(layout(), sequence_id(number), prompt(number, length), sampling)
        assert [token.token_id for token in target.tokens(number)] == expected
        assert [token.position for token in target.tokens(number)] == list(range(len(expected)))
    await source.settled()
    await target.settled()
    for number in numbers:
        assert source.tokens(number) == target.tokens(number)[:1]
    num_bytes, num_tokens = (now - then for now, then in zip(moved(source, target), before, strict=True))
    assert num_bytes == num_tokens * 3 * 2 * layout().token_bytes > 0


@pytest.mark.parametrize("block_size", [4, 16])
async def test_sequences_are_handed_over_for_real(block_size: int) -> None:
    """Also between block sizes: the fake engine's answer depends on every byte that it reads."""
    async with site("p", Role.PREFILL) as source, site("d", Role.DECODE, kv=layout(block_size)) as target:
        await meet(source, target)
        await hand_over(source, target, range(6))
        await hand_over(source, target, range(6, 8), SamplingParams(max_tokens=4, temperature=1.0, seed=99))


async def test_a_layout_mismatch_is_refused_at_pairing_with_both_values() -> None:
    async with site("p", Role.PREFILL) as source, site("d", Role.DECODE, kv=layout(dtype="float16")) as target:
        source.peers.announce((target.peers.card,))
        await source.until(lambda: bool(source.pairings))
        (failure,) = source.pairings
        assert failure is not None
        assert failure.kind is FailureKind.INVALID_REQUEST
        for text in ("p", "d", "KV dtype", "float32", "float16"):
            assert text in failure.message
        source.peers.announce((target.peers.card,))  # said again to a router that asks again
        assert len(source.pairings) == 2
        target.start(0, Task.DECODE, source, (1, 2), SAMPLING)
        assert target.failures[0].failure.kind is FailureKind.WORKER_LOST


async def pair_by_hand(target: Site, **changes: Any) -> tuple[Channel[WorkerToWorker], AnswerPairing]:
    """Dial a worker as a peer that the test plays."""
    channel = await dial(target.peers.card.control_address, DECODER, timeout_s=DEADLINE_S)
    mine = msgspec.structs.replace(target.peers.card, worker_id=WorkerId("by-hand"), incarnation=Incarnation(9))
    channel.send(RequestPairing(msgspec.structs.replace(mine, **changes)))
    answer = await channel.receive(DEADLINE_S)
    assert isinstance(answer, AnswerPairing)
    return channel, answer


async def test_the_answering_side_refuses_a_mismatch_too() -> None:
    async with site("d", Role.DECODE) as target:
        channel, answer = await pair_by_hand(target, layout=layout(dtype="bfloat16"))
        assert answer.failure is not None
        assert "bfloat16" in answer.failure.message
        assert answer.card == target.peers.card
        with pytest.raises(PeerLost):
            await channel.receive(DEADLINE_S)
        await channel.close()


@pytest.mark.parametrize("first", [Beat(2.5), b"garbage"])
async def test_who_does_not_ask_for_pairing_is_sent_away(first: object) -> None:
    async with site("d", Role.DECODE) as target, site("p", Role.PREFILL) as source:
        channel = await dial(target.peers.card.control_address, DECODER, timeout_s=DEADLINE_S)
        channel.send(first)
        with pytest.raises(PeerLost):
            await channel.receive(DEADLINE_S)
        await channel.close()
        await meet(source, target)


async def test_another_incarnation_than_the_announced_one_is_not_paired() -> None:
    async with site("p", Role.PREFILL) as source, site("d", Role.DECODE) as target:
        card = msgspec.structs.replace(target.peers.card, incarnation=Incarnation(1))
        with pytest.raises(PeerLost, match=f"{target.peers.card.incarnation:x}"):
            await source.peers._pair(card)
        assert source.pairings == []


async def test_a_restarted_peer_is_paired_again_and_serves() -> None:
    async with site("p", Role.PREFILL) as source:
        async with site("d", Role.DECODE) as target:
            await meet(source, target)
            await hand_over(source, target, range(2))
            old = target.peers.card
        await source.until(lambda: source.pairings[-1] is not None)
        assert source.pairings[-1].kind is FailureKind.WORKER_LOST  # type: ignore[union-attr]
        async with site("d", Role.DECODE) as again:
            assert again.peers.card.incarnation != old.incarnation
            await meet(source, again)
            await hand_over(source, again, range(2, 4))


async def test_a_restarted_peer_whose_loss_nobody_saw_replaces_the_old_one() -> None:
    """The source side comes back in a new incarnation while the old connection still looks alive."""
    async with site("d", Role.DECODE) as target:
        first, _ = await pair_by_hand(target)
        spec = SequenceSpec(sequence_id(0), (1, 2, 3), SAMPLING)
        start = StartSequence(spec, Task.DECODE, 1, (), WorkerId("by-hand"), Incarnation(9))
        target.worker.handle(RouterMessageReceived(start))
        second, answer = await pair_by_hand(target, incarnation=Incarnation(10))
        assert answer.failure is None
        await target.until(lambda: bool(target.failures))
        assert "replaced by a newer connection" in target.failures[0].failure.message
        await gone(first)
        await first.close()
        await second.close()
        await target.settled()


async def test_a_worker_that_drains_ends_when_nothing_is_left_and_not_before() -> None:
    async with site("d", Role.DECODE) as target:
        channel, _ = await pair_by_hand(target)
        spec = SequenceSpec(sequence_id(0), (1, 2, 3), SAMPLING)
        start = StartSequence(spec, Task.DECODE, 1, (), WorkerId("by-hand"), Incarnation(9))
        target.worker.handle(RouterMessageReceived(start))
        ending = asyncio.create_task(target.worker.ended())
        target.worker.drain()
        await asyncio.wait([ending], timeout=0.05)
        assert not ending.done()  # a hand-off is expected
        target.worker.handle(RouterMessageReceived(AbortSequence(sequence_id(0), 1, "moved")))
        async with asyncio.timeout(DEADLINE_S):
            await ending
        await channel.close()


async def test_a_broken_link_between_living_workers_is_mended() -> None:
    async with site("p", Role.PREFILL) as source, site("d", Role.DECODE) as target:
        await meet(source, target)
        target.peers._links[WorkerId("p")].channel._writer.transport.abort()
        await source.until(lambda: len(source.pairings) >= 3)
        assert [failure and failure.kind for failure in source.pairings[:3]] == [None, FailureKind.WORKER_LOST, None]
        await hand_over(source, target, range(2))


async def test_a_second_announcement_is_answered_at_once() -> None:
    async with site("p", Role.PREFILL) as source, site("d", Role.DECODE) as target:
        await meet(source, target)
        source.peers.announce((target.peers.card,))
        assert source.pairings == [None, None]
        assert len(target.peers._links) == 1


async def test_a_peer_that_left_and_came_back_is_still_watched_over() -> None:
    async with site("p", Role.PREFILL) as source, site("d", Role.DECODE) as target:
        await meet(source, target)
        source.peers.announce(())  # its connection to the router was lost
        await asyncio.sleep(0)
        await meet(source, target)
        before = len(source.pairings)
        target.peers._links[WorkerId("p")].channel._writer.transport.abort()
        await source.until(lambda: len(source.pairings) > before)


async def test_a_lost_link_fails_what_was_under_way_at_both_ends() -> None:
    async with site("p", Role.PREFILL) as source, site("d", Role.DECODE) as target:
        await meet(source, target)
        # Only one side is told: the source asks for a reservation that nobody expects, and asks again.
        source.start(0, Task.PREFILL, target, prompt(0, 20), SAMPLING)
        target.start(1, Task.DECODE, source, prompt(1, 20), SAMPLING)
        target.peers._links[WorkerId("p")].channel._writer.transport.abort()
        await source.until(lambda: bool(source.failures))
        await until(lambda: bool(target.failures))
        kinds = {report.failure.kind for report in (*source.failures, *target.failures)}
        assert kinds == {FailureKind.WORKER_LOST}
        await source.settled()
        await target.settled()


async def test_a_grant_with_too_few_blocks_fails_the_sequence_only() -> None:
    async with site("p", Role.PREFILL) as source:
        channel, _ = await pair_by_hand(source, role=Role.DECODE)
        spec = SequenceSpec(sequence_id(0), prompt(0, 20), SAMPLING)
        start = StartSequence(spec, Task.PREFILL, 1, (), WorkerId("by-hand"), Incarnation(9))
        source.worker.handle(RouterMessageReceived(start))
        while not isinstance(request := await channel.receive(DEADLINE_S), RequestReservation):
            pass
        grant = AnswerReservation(request.handoff_id, request.fence, blocks=(), grant_key=b"k", num_blocks=4)
        channel.send(grant)
        await source.until(lambda: bool(source.failures))
        (report,) = source.failures
        assert report.failure.kind is FailureKind.TRANSFER_FAILED
        assert "by-hand granted what cannot be" in report.failure.message
        while not isinstance(cancel := await channel.receive(DEADLINE_S), CancelHandoff):
            pass
        assert cancel.handoff_id == request.handoff_id
        await source.settled()
        await channel.close()


async def test_every_process_draws_its_own_secrets() -> None:
    async with site("a", Role.DECODE) as one, site("b", Role.DECODE) as other:
        seeds = [each.worker.scheduler.config.grant_seed for each in (one, other)]
        assert [len(seed) for seed in seeds] == [32, 32]
        assert seeds[0] != seeds[1]
        tokens = {
            endpoint.token
            for each in (one, other)
            for peer in (one, other)
            for endpoint in each.worker.courier.card_for(each.peers.card, peer.peers.card).data_endpoints
        }
        assert len(tokens) == 4
        assert all(endpoint.token == b"" for endpoint in one.peers.card.data_endpoints)


async def test_workers_named_by_host_meet_under_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their certificates hold these names, and not the addresses that the names stand for."""
    addresses = {"node-7": "127.0.0.7", "node-8": "127.0.0.8"}
    look_up = socket.getaddrinfo

    def found(host: Any, *rest: Any, **more: Any) -> Any:
        return look_up(addresses.get(host, host), *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    make_keys(tmp_path, tuple(addresses), days=1)
    source, target = (
        Site(name, role, layout(), 64, keys=str(tmp_path / host))
        for name, role, host in (("p", Role.PREFILL, "node-7"), ("d", Role.DECODE, "node-8"))
    )
    for each, host in ((source, "node-7"), (target, "node-8")):
        each.config = msgspec.structs.replace(each.config, host=host)
        await each.open()
    try:
        (data,) = target.peers.card.data_endpoints
        for address in (target.peers.card.control_address, data.address):
            assert address.startswith("node-8:")
        await meet(source, target)
        await hand_over(source, target, range(2))
    finally:
        await source.close()
        await target.close()


async def test_a_host_that_is_no_address_of_this_machine_is_a_matter_of_configuration(tmp_path: Path) -> None:
    make_keys(tmp_path, ("203.0.113.9", "a..b"), days=1)
    for host in ("203.0.113.9", "a..b"):
        made = Site("d", Role.DECODE, layout(), 64, keys=str(tmp_path / host))
        made.config = msgspec.structs.replace(made.config, host=host)
        with pytest.raises(ConfigurationError, match=f"cannot listen on {re.escape(host)}: .*--host"):
            await made.open()
