"""Spans become byte runs of both arenas, and what the transport says becomes the scheduler's events."""

import msgspec
import pytest

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId, Fence, HandoffId, Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.roles import Numerics, Role
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.segments import block_segments, span_segments
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.handoff import GrantKey
from disagg.scheduler import events
from disagg.scheduler.actions import OpenGrant, PushSpan, RevokeGrant, StopPushes
from disagg.testing.memory import BytesMemory
from disagg.transport.api import ConnectionLost, TransportEvent, WriteLanded
from disagg.transport.in_process import InProcessNetwork
from disagg.worker.courier import Courier, Mover, PushTag

HANDOFF = HandoffId(SequenceId(RequestId(Incarnation(1), 2), 0), 1)
KEY = GrantKey(HANDOFF, Fence(Incarnation(1), Incarnation(2), 1)).encode()
NUM_BLOCKS = 8


def layout(block_size: int) -> KvLayout:
    return KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", block_size=block_size)


class End:
    """A courier on an in-process network that moves nothing by itself."""

    def __init__(self, network: InProcessNetwork, name: str, incarnation: int, block_size: int) -> None:
        kv = layout(block_size)
        self.memory = BytesMemory(kv.arena_bytes(NUM_BLOCKS))
        self.events: list[events.Event] = []
        self.post: list[TransportEvent] = []
        bare = WorkerCard(
            worker_id=WorkerId(name),
            incarnation=Incarnation(incarnation),
            role=Role.PREFILL,
            pool=PoolCard("m", "w", "t", Numerics.EXACT, 10, 100),
            layout=kv,
            num_blocks=NUM_BLOCKS,
            control_address="",
            data_endpoints=(),
        )
        self.courier = Courier(
            bare,
            lambda post: {
                TransportKind.IN_PROCESS: Mover(
                    network.sender(bare.worker_id, bare.incarnation, self.memory, post),
                    network.receiver(name, bare.incarnation, self.memory, post),
                )
            },
        )
        self.courier.start(self.events.append)


@pytest.fixture
def ends() -> tuple[InProcessNetwork, End, End]:
    network = InProcessNetwork(threaded=False)
    source, target = End(network, "p", 1, block_size=4), End(network, "d", 2, block_size=8)
    source.courier.connect(target.courier.card, TransportKind.IN_PROCESS)
    target.courier.connect(source.courier.card, TransportKind.IN_PROCESS)
    return network, source, target


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(each) for each in ids)


SPAN = Span(3, 10, 1, 2)
PUSH = PushSpan(HANDOFF, WorkerId("d"), KEY, 5, SPAN, blocks(6, 1, 3), blocks(7, 2), NUM_BLOCKS)


def test_its_card_names_the_endpoints_it_listens_on(ends: tuple[InProcessNetwork, End, End]) -> None:
    _, source, _ = ends
    assert source.courier.card.data_endpoints == (Endpoint(TransportKind.IN_PROCESS, "p"),)


def test_a_push_moves_the_span_between_block_sizes_and_both_ends_hear_of_it(
    ends: tuple[InProcessNetwork, End, End],
) -> None:
    network, source, target = ends
    reading = span_segments(layout(4), NUM_BLOCKS, PUSH.source_blocks, SPAN)
    offset = 0
    for segment in reading:
        data = bytes((offset + index) % 251 + 1 for index in range(segment.length))
        source.memory.fill(segment, data)
        offset += segment.length
    target.courier.open_grant(OpenGrant(KEY, WorkerId("p"), PUSH.destination_blocks))
    source.courier.push(PUSH)
    network.deliver_all()
    writing = span_segments(layout(8), NUM_BLOCKS, PUSH.destination_blocks, SPAN)
    assert target.memory.read(writing) == source.memory.read(reading)
    assert target.events == [events.WriteLanded(HANDOFF, layout(8).clipped(SPAN), None)]
    assert source.events == [events.WriteFinished(HANDOFF, 5, None)]
    source.courier.check_invariants()
    target.courier.check_invariants()


def test_nothing_lands_outside_the_granted_blocks(ends: tuple[InProcessNetwork, End, End]) -> None:
    network, source, target = ends
    target.courier.open_grant(OpenGrant(KEY, WorkerId("p"), blocks(7)))
    source.courier.push(PUSH)
    network.deliver_all()
    (finished,) = source.events
    assert isinstance(finished, events.WriteFinished)
    assert finished.failure is not None
    assert target.events == []
    everything = block_segments(layout(8), NUM_BLOCKS, blocks(*range(NUM_BLOCKS)))
    assert not any(target.memory.read(everything))


def test_a_revoked_grant_is_fenced_and_takes_no_more(ends: tuple[InProcessNetwork, End, End]) -> None:
    network, source, target = ends
    target.courier.open_grant(OpenGrant(KEY, WorkerId("p"), PUSH.destination_blocks))
    target.courier.revoke_grant(RevokeGrant(KEY))
    assert target.events == [events.GrantFenced(HANDOFF)]
    source.courier.push(PUSH)
    network.deliver_all()
    assert [type(event) for event in target.events] == [events.GrantFenced]


def test_a_push_to_nobody_fails_at_once(ends: tuple[InProcessNetwork, End, End]) -> None:
    _, source, _ = ends
    source.courier.disconnect(WorkerId("d"))
    source.courier.push(PUSH)
    assert source.events == [events.WriteFinished(HANDOFF, 5, "d is not connected")]


@pytest.mark.parametrize("is_connected", [True, False])
def test_stopping_pushes_is_always_answered(ends: tuple[InProcessNetwork, End, End], is_connected: bool) -> None:
    _, source, _ = ends
    source.courier.push(PUSH)
    if not is_connected:
        source.courier.disconnect(WorkerId("d"))
    source.courier.stop_pushes(StopPushes(KEY, WorkerId("d")))
    assert [type(event) for event in source.events] == [events.WriteFinished, events.WritesStopped]
    assert source.events[1] == events.WritesStopped(HANDOFF)


@pytest.mark.parametrize(
    ("tag", "num_bytes", "said"),
    [
        (b"\xc1", 8, "unreadable tag"),
        (msgspec.msgpack.encode(PushTag(SPAN)), layout(8).span_bytes(SPAN) - 1, "bytes came for"),
        (msgspec.msgpack.encode(PushTag(Span(0, 4, 2, 3))), layout(8).span_bytes(SPAN) * 4 // 7, "which keeps"),
    ],
)
def test_a_landing_that_does_not_fit_its_tag_is_rejected(
    ends: tuple[InProcessNetwork, End, End], tag: bytes, num_bytes: int, said: str
) -> None:
    _, _, target = ends
    target.courier._on_transport_event(0, WriteLanded(WorkerId("p"), KEY, 1, tag, num_bytes, None))
    (landed,) = target.events
    assert isinstance(landed, events.WriteLanded)
    assert landed.failure is not None
    assert said in landed.failure


def test_a_lost_data_connection_alone_is_no_event(ends: tuple[InProcessNetwork, End, End]) -> None:
    """Its writes have failed, each with an event of its own."""
    _, source, _ = ends
    source.courier._on_transport_event(0, ConnectionLost(WorkerId("d"), "reset"))
    assert source.events == []


def test_a_peer_without_common_transport_cannot_be_connected(ends: tuple[InProcessNetwork, End, End]) -> None:
    _, source, target = ends
    card = msgspec.structs.replace(target.courier.card, data_endpoints=(Endpoint(TransportKind.TCP, "127.0.0.1:1"),))
    with pytest.raises(InternalFault, match="d was paired without a common transport"):
        source.courier.connect(card, TransportKind.TCP)
