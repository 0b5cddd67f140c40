"""Class C, C3: a hand-off's time is over while its bytes are sent: its blocks wait for the transport."""

import asyncio

import msgspec
import pytest
from tests.faults.outputs import KV
from tests.faults.words import (
    CANCELLED,
    FROM_PEER,
    PROMPT,
)
from tests.unit.scheduler.rigs import (
    PEER,
    PEER_INCARNATION,
    Solo,
    handoff,
    of,
    sequence_id,
    to_peer,
)
from tests.unit.transport.relays import Relay
from tests.unit.transport.rigs import EventLog
from tests.unit.worker.rigs import DEADLINE_S, Site, until

from disagg.channel.channel import Channel
from disagg.channel.listening import listen
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import FailureKind
from disagg.core.ids import BlockId, HandoffId, Incarnation, WorkerId
from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import Numerics, Role, Task
from disagg.core.spans import Span
from disagg.kvcache.segments import block_segments, span_segments
from disagg.policy.batching import StepBudget
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.handoff import GrantKey, decode_grant_key
from disagg.protocol.lifecycle import SequenceState
from disagg.protocol.messages import (
    AnswerPairing,
    AnswerReservation,
    CancelHandoff,
    FinishPrefill,
    RequestPairing,
    RequestReservation,
    StartSequence,
    TakeHandoff,
    WorkerToWorker,
)
from disagg.scheduler import events
from disagg.scheduler.actions import Action, PushSpan, StopPushes
from disagg.testing.engine import kv_bytes
from disagg.testing.memory import BytesMemory
from disagg.transport.api import TransportEvent, WriteLanded
from disagg.transport.tcp_receiver import TcpReceiver


@pytest.mark.parametrize("why", ["lease", "abort", "peer lost", "cancelled by the peer", "push failed twice"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_c3_blocks_that_are_being_sent_are_given_to_nobody_before_the_transport_has_stopped(
    why: str, num_steps: int
) -> None:
    """A second sequence needs all blocks there are: it gets them with the transport's word, and not a moment before."""
    budget = StepBudget(chunk_tokens=6, mixed_chunk_tokens=6, max_running=8)
    solo = Solo(Role.PREFILL, num_blocks=3, budget=budget, lease_s=9.0)
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    pushes = of(PushSpan, solo.layers(1))
    for _ in range(num_steps):
        pushes += of(PushSpan, solo.finish_step())
    assert pushes
    stops = of(StopPushes, _end(solo, why))
    assert len(stops) == 1
    if solo.plan is not None:
        assert of(PushSpan, solo.finish_step()) == []
    if why == "peer lost":
        solo.meet(Role.DECODE)
    solo.start(1, Task.PREFILL, tuple(range(50, 60)))
    for number in range(len(pushes) - 1):  # late words about the writes are not the transport's last
        solo.handle(events.WriteFinished(handoff(0), number, None if number % 2 else "shut"))
        assert solo.scheduler._state.sequences[handoff(1)].blocks == ()
    assert to_peer(RequestReservation, solo.wait(0.1)) == []
    asked = to_peer(RequestReservation, solo.handle(events.WritesStopped(handoff(0))))
    assert [request.handoff_id for request in asked] == [handoff(1)]
    assert solo.scheduler._state.sequences[handoff(1)].blocks != ()


def _end(solo: Solo, why: str) -> list[Action]:
    match why:
        case "lease":
            return solo.wait(9.1)
        case "abort":
            return solo.abort(0)
        case "peer lost":
            return solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "killed"))
        case "cancelled by the peer":
            return solo.hear(CancelHandoff(handoff(0), solo.fence(), CANCELLED))
        case _:
            solo.handle(events.WriteFinished(handoff(0), 0, "checksum"))
            return solo.handle(events.WriteFinished(handoff(0), 0, "checksum"))


NUM_BLOCKS = 40


class SilentDecode:
    """A decode worker by hand: it pairs, beats and grants, takes bytes for real, and never speaks of its leases."""

    def __init__(self) -> None:
        self.memory = BytesMemory(KV.arena_bytes(NUM_BLOCKS))
        self.landed = EventLog()
        self.landed.on_event = self._on_transport
        self.incarnation = Incarnation(77)
        self.receiver = TcpReceiver(self.memory, self.incarnation, self.landed.post)
        self.relay = Relay(self.receiver.endpoint.address)
        self.channel: Channel[WorkerToWorker] | None = None
        self.finished: list[FinishPrefill] = []
        self.grants: dict[HandoffId, tuple[BlockId, ...]] = {}
        self._num_bytes: dict[bytes, int] = {}
        self._lost = asyncio.Event()

    async def open(self) -> WorkerCard:
        self._server = await listen("127.0.0.1", 0, FROM_PEER, self._welcome)
        self.card = WorkerCard(
            worker_id=WorkerId("decode-0"),
            incarnation=self.incarnation,
            role=Role.DECODE,
            pool=PoolCard("fake", "weights", "tok", Numerics.EXACT, 1000, max_context=256),
            layout=KV,
            num_blocks=NUM_BLOCKS,
            control_address=self._server.address,
            data_endpoints=(Endpoint(TransportKind.TCP, self.relay.address),),
        )
        return self.card

    async def close(self) -> None:
        self._server.close()
        if self.channel is not None:
            await self.channel.close()
        await asyncio.to_thread(self.receiver.close)
        await asyncio.to_thread(self.relay.close)

    def num_landed(self, number: int) -> int:
        """Bytes verified for one hand-off."""
        return sum(n for key, n in dict(self._num_bytes).items() if decode_grant_key(key).handoff_id == handoff(number))

    async def _welcome(self, channel: Channel[WorkerToWorker]) -> None:
        request = await channel.receive(DEADLINE_S)
        assert isinstance(request, RequestPairing)
        self._peer = request.card.worker_id
        token = self.receiver.endpoint_for(request.card.worker_id, request.card.incarnation).token
        endpoint = Endpoint(TransportKind.TCP, self.relay.address, token)
        channel.send(AnswerPairing(msgspec.structs.replace(self.card, data_endpoints=(endpoint,))))
        self.channel = channel
        channel.start(beat_interval_s=0.2, on_message=self._on_message, on_lost=lambda reason: self._lost.set())

    def _on_message(self, message: WorkerToWorker) -> None:
        if isinstance(message, RequestReservation) and message.handoff_id not in self.grants:
            first = 18 * len(self.grants)
            blocks = tuple(BlockId(block) for block in range(first, first - (-message.num_tokens // KV.block_size)))
            self.grants[message.handoff_id] = blocks
            key = GrantKey(message.handoff_id, message.fence).encode()
            self.receiver.grant(self._peer, key, block_segments(KV, NUM_BLOCKS, blocks))
            assert self.channel is not None
            answer = AnswerReservation(message.handoff_id, message.fence, None, 0.0, blocks, 0, key, NUM_BLOCKS)
            self.channel.send(answer)
        elif isinstance(message, FinishPrefill):
            self.finished.append(message)

    def _on_transport(self, event: TransportEvent) -> None:
        if isinstance(event, WriteLanded) and event.failure is None:
            self._num_bytes[event.key] = self._num_bytes.get(event.key, 0) + event.num_bytes


async def test_c3_the_lease_ends_inside_a_frame_on_tcp_and_its_blocks_wait_for_the_transport() -> None:
    """The peer is alive and silent, the bytes are stuck on the way. What lands is the old prompt's, or nothing."""
    old, new = (tuple((start + index) % 900 for index in range(250)) for start in (0, 450))
    decode = SilentDecode()
    prefill = Site("prefill-0", Role.PREFILL, KV, 20)  # 16 blocks a prompt: two do not fit
    # Longer than a busy machine needs to begin to send, and for all that the second prompt is to be granted.
    prefill.config = msgspec.structs.replace(prefill.config, lease_s=5.0)
    await prefill.open()
    try:
        prefill.peers.announce((await decode.open(),))
        await prefill.until(lambda: None in prefill.pairings)
        order = watch(prefill)
        decode.relay.hold_ahead(1 << 20)
        begin(prefill, 0, old)
        await prefill.until(lambda: bool(prefill.failures))
        assert [each.failure.kind for each in prefill.failures] == [FailureKind.LEASE_EXPIRED]
        sequences = prefill.worker.scheduler._state.sequences
        assert sequences[handoff(0)].state is SequenceState.CLOSING, "nothing was being sent: nothing is proven"
        held = set(sequences[handoff(0)].blocks)
        begin(prefill, 1, new)
        assert sequences[handoff(1)].blocks == ()
        await until(lambda: handoff(1) not in sequences or sequences[handoff(1)].blocks != ())
        assert order[0] == "stopped", "the new prompt had its blocks before the transport had stopped"
        assert held & set(sequences[handoff(1)].blocks)
        decode.relay.release()
        total = KV.span_bytes(Span(0, 250, 0, 2))
        await until(lambda: decode.num_landed(1) == total and bool(decode.finished))
        check_contents(decode, 1, new, may_be_missing=False)
        check_contents(decode, 0, old, may_be_missing=True)
        assert decode.channel is not None
        decode.channel.send(TakeHandoff(handoff(1), decode.finished[-1].fence))
        await prefill.settled()
    finally:
        await prefill.close()
        await decode.close()


def begin(prefill: Site, number: int, prompt: tuple[int, ...]) -> None:
    spec = SequenceSpec(sequence_id(number), prompt, SamplingParams(3, temperature=0.0))
    message = StartSequence(spec, Task.PREFILL, 1, (), WorkerId("decode-0"), Incarnation(77))
    prefill.worker.handle(events.RouterMessageReceived(message))


def watch(prefill: Site) -> list[str]:
    """In which order the transport stopped and the second prompt got its blocks."""
    order: list[str] = []
    original = prefill.worker.handle

    def spy(event: events.Event) -> None:
        if isinstance(event, events.WritesStopped):
            order.append("stopped")
        original(event)
        second = prefill.worker.scheduler._state.sequences.get(handoff(1))
        if second is not None and second.blocks and "given" not in order:
            order.append("given")

    prefill.worker.handle = spy  # type: ignore[method-assign]
    return order


def check_contents(decode: SilentDecode, number: int, prompt: tuple[int, ...], *, may_be_missing: bool) -> None:
    """Every token's KV under this grant is that prompt's, bit for bit; or untouched, where that is allowed."""
    blocks = decode.grants[handoff(number)]
    for layer in range(KV.num_layers):
        for position, token in enumerate(prompt):
            span = Span(position, position + 1, layer, layer + 1)
            found = decode.memory.read(span_segments(KV, NUM_BLOCKS, blocks, span))
            wanted = b"".join(kv_bytes(KV, token, position, layer, kv) for kv in (0, 1))
            for start in range(0, len(found), KV.token_bytes):
                part = found[start : start + KV.token_bytes]
                is_untouched = may_be_missing and not any(part)
                # A frame that was cut ends inside a token: what is there of it is still the old one's.
                is_cut = may_be_missing and all(
                    a in (0, b) for a, b in zip(part[::512], wanted[start::512], strict=False)
                )
                assert part == wanted[start : start + KV.token_bytes] or is_untouched or is_cut, (number, position)
