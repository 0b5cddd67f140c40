"""Turns the scheduler's spans and hand-offs into the transport's segments and keys, and its events back.

A worker of several ranks has one arena and one set of transports per rank. The scheduler knows of one hand-off, one
push and one fence: what the ranks do of each is planned here, and their answers are joined to one.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from disagg.channel.tally import Refusal, Tally
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InternalFault
from disagg.core.ids import Incarnation, WorkerId, rank_name
from disagg.core.spans import MAX_TOKENS, KvLayout, Span
from disagg.kvcache.conversion import (
    ConvertingMemory,
    Holding,
    Piece,
    SpanRead,
    landing_blocks,
    plan_pieces,
    rank_pairs,
)
from disagg.kvcache.memory import Segment
from disagg.protocol.cards import WorkerCard
from disagg.protocol.handoff import GrantKey, decode_grant_key
from disagg.protocol.pairing import common_kinds, endpoints_over
from disagg.scheduler import events
from disagg.scheduler.actions import OpenGrant, PushSpan, RevokeGrant, StopPushes
from disagg.transport.api import (
    ConnectionLost,
    GrantFenced,
    Receiver,
    Sender,
    TransportEvent,
    Write,
    WriteFinished,
    WriteLanded,
    WriterStuck,
    WritesStopped,
)
from disagg.transport.probe import Measured
from disagg.worker.joins import JoinTable

_log = logging.getLogger(__name__)


Measure = Callable[[Endpoint, Incarnation, float], Measured]  # within so many seconds; raises PeerFault, OSError


class Mover(NamedTuple):
    """Both ends of one transport over the arena of one rank, and what some of them can do besides."""

    sender: Sender
    receiver: Receiver
    outgoing: ConvertingMemory | None = None  # what the sender reads, where it can turn spans
    measure: Measure | None = None
    refused: Tally | None = None  # what the receiver turned away


class PushTag(msgspec.Struct, frozen=True, array_like=True):
    """Travels with a push, for the receiving scheduler."""

    span: Span


class _Peer(NamedTuple):
    card: WorkerCard
    kind: TransportKind  # what we write over
    incoming: tuple[TransportKind, ...]  # what it may write over: the choice is its own

    @property
    def ranks(self) -> tuple[WorkerId, ...]:
        return rank_names(self.card)


class _RankGrant(NamedTuple):
    """What one rank of a peer may do at one rank of ours, over one kind."""

    rank: int
    kind: TransportKind
    key: bytes


class _Part(NamedTuple):
    """One rank's write of a push to one rank of the peer."""

    rank: int
    peer: WorkerId
    key: bytes
    number: int


_TAG_DECODER = msgspec.msgpack.Decoder(PushTag)

MakeMovers = Callable[[Callable[[TransportEvent], None]], Mapping[TransportKind, Mover]]


def rank_names(card: WorkerCard) -> tuple[WorkerId, ...]:
    """What each rank calls itself on data connections: a receiver knows one sender per name."""
    ranks = range(card.layout.num_ranks)
    return (card.worker_id,) if len(ranks) == 1 else tuple(rank_name(card.worker_id, rank) for rank in ranks)


class Courier:
    """Called on the loop's thread, but for _on_transport_event, which runs on the transport's threads."""

    def __init__(self, card: WorkerCard, *make_movers: MakeMovers) -> None:
        """`card` without its data endpoints: they are known once the receivers listen. One make_movers per rank."""
        if len(make_movers) != card.layout.num_ranks:
            raise InternalFault(f"transports of {len(make_movers)} ranks for {card.layout.num_ranks} of {card.layout}")
        self._post: Callable[[events.Event], None] | None = None
        self._ranks = [make(partial(self._on_transport_event, rank)) for rank, make in enumerate(make_movers)]
        endpoints = tuple(
            msgspec.structs.replace(mover.receiver.endpoint, rank=rank)
            for rank, movers in enumerate(self._ranks)
            for mover in movers.values()
        )
        self.card = msgspec.structs.replace(card, data_endpoints=endpoints)
        self._peers: dict[WorkerId, _Peer] = {}
        self._grants: dict[bytes, list[_RankGrant]] = {}
        self._fences: JoinTable[bytes] = JoinTable()
        self._stops: JoinTable[bytes] = JoinTable()
        self._writes: JoinTable[tuple[bytes, int]] = JoinTable()
        self._reads: dict[_Part, tuple[ConvertingMemory, Segment]] = {}

    @property
    def layout(self) -> KvLayout:
        return self.card.layout

    def start(self, post: Callable[[events.Event], None]) -> None:
        """`post` takes events from any thread."""
        self._post = post

    def kinds_to(self, card: WorkerCard) -> tuple[TransportKind, ...]:
        """What KV could go over to a peer."""
        return common_kinds(self.card, card)

    def connect(self, card: WorkerCard, kind: TransportKind) -> None:
        """Name a paired peer; bytes to it take one of kinds_to() it, from now until disconnect()."""
        endpoints = endpoints_over(self.card, card, kind)
        if not endpoints:
            raise InternalFault(f"{card.worker_id} was paired without a common transport, or {kind} is none")
        peer = self._peers[card.worker_id] = _Peer(card, kind, common_kinds(card, self.card))
        _log.info("KV to %s goes over %s", card.worker_id, kind)
        for movers in self._ranks:
            for name, endpoint in zip(peer.ranks, endpoints, strict=True):
                movers[kind].sender.connect(name, endpoint, card.incarnation)

    def card_for(self, card: WorkerCard, peer: WorkerCard) -> WorkerCard:
        """This worker's card as one paired peer, and nobody else, is to see it."""
        endpoints = []
        for endpoint in card.data_endpoints:  # where the card says, which need not be where a receiver listens
            receiver = self._ranks[endpoint.rank][endpoint.kind].receiver
            own = receiver.endpoint_for(peer.worker_id, peer.incarnation)
            endpoints.append(msgspec.structs.replace(endpoint, token=own.token))
        return msgspec.structs.replace(card, data_endpoints=tuple(endpoints))

    def measure(self, card: WorkerCard, kind: TransportKind, budget_s: float) -> Measured | None:
        """How fast a kind is between the first ranks; the peer need not be connected. Blocking, from any thread.

        None where there is nothing to measure. Raises PeerFault, OSError.
        """
        ask, endpoints = self._ranks[0][kind].measure, endpoints_over(self.card, card, kind)
        return ask(endpoints[0], card.incarnation, budget_s) if ask is not None and endpoints else None

    def take_refusals(self) -> dict[Refusal, int]:
        """Data connections and frames turned away since this was last asked."""
        taken: dict[Refusal, int] = {}
        for mover in (mover for movers in self._ranks for mover in movers.values()):
            for reason, count in mover.refused.take().items() if mover.refused is not None else ():
                taken[reason] = taken.get(reason, 0) + count
        return taken

    def disconnect(self, worker_id: WorkerId) -> None:
        """Unfinished writes to this peer fail; grants to it stay until they are revoked."""
        peer = self._peers.pop(worker_id, None)
        if peer is None:
            return
        for movers in self._ranks:
            for name in peer.ranks:
                movers[peer.kind].sender.disconnect(name)

    def close(self) -> None:
        """Blocking, bounded by the transports' own deadlines."""
        for movers in self._ranks:
            for mover in movers.values():
                mover.sender.close()
                mover.receiver.close()

    # --- actions -----------------------------------------------------------------------------------------------

    def open_grant(self, action: OpenGrant) -> None:
        peer, key = self._peers.get(action.peer), decode_grant_key(action.grant_key)
        kinds = peer.incoming if peer is not None else tuple(self._ranks[0])[:1]
        theirs = peer.card.layout if peer is not None else msgspec.structs.replace(self.layout, **_ONE_RANK)
        names = peer.ranks if peer is not None else (action.peer,)
        granted: list[_RankGrant] = []
        for source, rank, _ in rank_pairs(theirs, self.layout, _whole(self.layout)):
            layout, rank_key = self.layout.rank_layout(rank), key.of_rank(source).encode()
            segments = landing_blocks(layout, self.card.num_blocks, action.blocks, self.card.kv_wire)
            for kind in kinds:
                self._ranks[rank][kind].receiver.grant(names[source], rank_key, segments)
                granted.append(_RankGrant(rank, kind, rank_key))
        self._grants[action.grant_key] = granted

    def revoke_grant(self, action: RevokeGrant) -> None:
        granted = self._grants.pop(action.grant_key)
        self._fences.expect(action.grant_key, len(granted))
        for rank, kind, key in granted:
            self._ranks[rank][kind].receiver.revoke(key)

    def push(self, action: PushSpan) -> None:
        peer = self._peers.get(action.peer)
        if peer is None:
            self._tell(events.WriteFinished(action.handoff_id, action.number, f"{action.peer} is not connected"))
            return
        source = Holding(self.layout, self.card.num_blocks, action.source_blocks)
        target = Holding(peer.card.layout, action.destination_num_blocks, action.destination_blocks)
        writes: list[tuple[int, Write]] = []
        try:
            for piece in plan_pieces(source, target, action.span, self.card.kv_wire):
                writes.append((piece.source_rank, self._write_of(action, peer, piece)))
        except InternalFault as error:
            for rank, write in writes:
                self._close_read(_Part(rank, write.peer, write.key, write.number))
            self._tell(events.WriteFinished(action.handoff_id, action.number, str(error)))
            return
        self._writes.expect((action.grant_key, action.number), len(writes))
        for rank, write in writes:
            self._ranks[rank][peer.kind].sender.write(write)

    def _write_of(self, action: PushSpan, peer: _Peer, piece: Piece) -> Write:
        """One rank's part of a push. Raises InternalFault."""
        rank, name = piece.source_rank, peer.ranks[piece.destination_rank]
        key = decode_grant_key(action.grant_key).of_rank(rank).encode()
        source = piece.source
        if isinstance(source, SpanRead):
            memory = self._ranks[rank][peer.kind].outgoing
            if memory is None:
                raise InternalFault(f"{self.layout} cannot be turned into {peer.card.layout} by this worker's memory")
            segment = memory.open_read(source)
            self._reads[_Part(rank, name, key, action.number)] = (memory, segment)
            source = (segment,)
        tag = msgspec.msgpack.encode(PushTag(piece.span))
        return Write(name, key, action.number, tag, source, piece.destination)

    def stop_pushes(self, action: StopPushes) -> None:
        peer, key = self._peers.get(action.peer), decode_grant_key(action.grant_key)
        if peer is None:  # disconnected: its writes have failed and nothing reads our blocks any more
            self._tell(events.WritesStopped(key.handoff_id))
            return
        self._stops.expect(action.grant_key, len(self._ranks) * len(peer.ranks))
        for rank, movers in enumerate(self._ranks):
            for name in peer.ranks:
                movers[peer.kind].sender.cancel(name, key.of_rank(rank).encode())

    # --- transport threads -------------------------------------------------------------------------------------

    def _on_transport_event(self, rank: int, event: TransportEvent) -> None:
        if isinstance(event, ConnectionLost):
            _log.info("data connection to %s lost: %s", event.peer, event.reason)
            return
        if isinstance(event, WriterStuck):
            _log.error("%s (process %d) may still write here and was ended by force", event.peer, event.pid)
            return
        key = decode_grant_key(event.key)
        whole, handoff_id = key.of_rank(0).encode(), key.handoff_id
        match event:
            case WriteFinished():
                self._close_read(_Part(rank, event.peer, event.key, event.number))
                joined = self._writes.take((whole, event.number), event.failure)
                if joined is not None:
                    self._tell(events.WriteFinished(handoff_id, event.number, joined.failure))
            case WriteLanded():
                self._tell(self._landed(rank, key, event))
            case GrantFenced():
                if self._fences.take(whole) is not None:
                    self._tell(events.GrantFenced(handoff_id))
            case WritesStopped():
                if self._stops.take(whole) is not None:
                    self._tell(events.WritesStopped(handoff_id))

    def _close_read(self, part: _Part) -> None:
        memory, segment = self._reads.pop(part, (None, None))
        if memory is not None and segment is not None:
            memory.close_read(segment)

    def _landed(self, rank: int, key: GrantKey, event: WriteLanded) -> events.WriteLanded:
        handoff_id = key.handoff_id
        try:
            span = self.layout.clipped(_TAG_DECODER.decode(event.tag).span)
        except (msgspec.DecodeError, RecursionError) as error:
            return events.WriteLanded(handoff_id, Span(0, 0, 0, 0), f"unreadable tag: {error}")
        failure, due_bytes = event.failure, self.layout.span_bytes(span, self.card.kv_wire)
        if failure is None and due_bytes != event.num_bytes:
            failure = f"{event.num_bytes} bytes came for {span}, which takes {due_bytes}"
        if failure is None and span.intersection(self.layout.rank_span(rank)) != span:
            failure = f"{span} came to rank {rank}, which keeps {self.layout.rank_span(rank)}"
        return events.WriteLanded(handoff_id, span, failure)

    def _tell(self, event: events.Event) -> None:
        if self._post is not None:
            self._post(event)

    def check_invariants(self) -> None:
        for key, granted in self._grants.items():
            handoff_id = decode_grant_key(key).handoff_id
            if any(each.kind not in self._ranks[each.rank] for each in granted):
                raise InternalFault(f"{handoff_id} has a grant on a transport that this worker does not have")
            if any(decode_grant_key(each.key).handoff_id != handoff_id for each in granted):
                raise InternalFault(f"a rank's grant of {handoff_id} is of another hand-off")
        for table in (self._fences, self._stops, self._writes):
            table.check_invariants()
        if not len(self._writes) and self._reads:
            raise InternalFault(f"{len(self._reads)} reads are open and no push is under way")


_ONE_RANK = {"head_shards": 1, "layer_shards": 1}


def _whole(layout: KvLayout) -> Span:
    return Span(0, MAX_TOKENS, 0, layout.num_layers, 0, layout.num_kv_heads)
