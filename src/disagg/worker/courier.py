"""Turns the scheduler's spans and hand-offs into the transport's segments and keys, and its events back."""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from disagg.channel.tally import Refusal, Tally
from disagg.core.endpoints import TransportKind
from disagg.core.errors import InternalFault
from disagg.core.ids import HandoffId, WorkerId
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.segments import block_segments, span_segments
from disagg.protocol.handoff import decode_grant_key
from disagg.protocol.messages import WorkerCard
from disagg.protocol.pairing import common_endpoint
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
    WritesStopped,
)
from disagg.transport.tcp_probe import Measured

_log = logging.getLogger(__name__)


class Mover(NamedTuple):
    """Both ends of one transport over this worker's arena, and what some of them can do besides."""

    sender: Sender
    receiver: Receiver
    measure: Callable[[WorkerId], Measured] | None = None  # blocking; raises PeerFault, OSError
    refused: Tally | None = None  # what the receiver turned away


class PushTag(msgspec.Struct, frozen=True, array_like=True):
    """Travels with a push, for the receiving scheduler."""

    span: Span


_TAG_DECODER = msgspec.msgpack.Decoder(PushTag)

MakeMovers = Callable[[Callable[[TransportEvent], None]], Mapping[TransportKind, Mover]]


class Courier:
    """Called on the loop's thread, but for _on_transport_event, which runs on the transport's threads."""

    def __init__(self, card: WorkerCard, make_movers: MakeMovers) -> None:
        """`card` without its data endpoints: they are known once the receivers listen."""
        self._post: Callable[[events.Event], None] | None = None
        self._movers = make_movers(self._on_transport_event)
        endpoints = tuple(mover.receiver.endpoint for mover in self._movers.values())
        self.card = msgspec.structs.replace(card, data_endpoints=endpoints)
        self._peers: dict[WorkerId, tuple[WorkerCard, TransportKind]] = {}
        self._grants: dict[bytes, TransportKind] = {}

    @property
    def layout(self) -> KvLayout:
        return self.card.layout

    def start(self, post: Callable[[events.Event], None]) -> None:
        """`post` takes events from any thread."""
        self._post = post

    def connect(self, card: WorkerCard) -> None:
        """Name a paired peer; bytes to it take the best transport both offer."""
        endpoint = common_endpoint(self.card, card)
        if endpoint is None:
            raise InternalFault(f"{card.worker_id} was paired without a common transport")
        self._peers[card.worker_id] = (card, endpoint.kind)
        self._movers[endpoint.kind].sender.connect(card.worker_id, endpoint, card.incarnation)

    def card_for(self, card: WorkerCard, peer: WorkerCard) -> WorkerCard:
        """This worker's card as one paired peer, and nobody else, is to see it."""
        endpoints = []
        for endpoint in card.data_endpoints:  # where the card says, which need not be where a receiver listens
            own = self._movers[endpoint.kind].receiver.endpoint_for(peer.worker_id, peer.incarnation)
            endpoints.append(msgspec.structs.replace(endpoint, token=own.token))
        return msgspec.structs.replace(card, data_endpoints=tuple(endpoints))

    def transport_to(self, worker_id: WorkerId) -> TransportKind | None:
        """What bytes to this peer take; None for one that is not connected."""
        known = self._peers.get(worker_id)
        return known[1] if known is not None else None

    def can_measure(self, worker_id: WorkerId) -> bool:
        kind = self.transport_to(worker_id)
        return kind is not None and self._movers[kind].measure is not None

    def measure(self, worker_id: WorkerId) -> Measured | None:
        """Blocking, from any thread. None where there is nothing to measure. Raises PeerFault, OSError."""
        kind = self.transport_to(worker_id)
        ask = self._movers[kind].measure if kind is not None else None
        return ask(worker_id) if ask is not None else None

    def take_refusals(self) -> dict[Refusal, int]:
        """Data connections and frames turned away since this was last asked."""
        taken: dict[Refusal, int] = {}
        for mover in self._movers.values():
            for reason, count in mover.refused.take().items() if mover.refused is not None else ():
                taken[reason] = taken.get(reason, 0) + count
        return taken

    def disconnect(self, worker_id: WorkerId) -> None:
        """Unfinished writes to this peer fail; grants to it stay until they are revoked."""
        known = self._peers.pop(worker_id, None)
        if known is not None:
            self._movers[known[1]].sender.disconnect(worker_id)

    def close(self) -> None:
        """Blocking, bounded by the transports' own deadlines."""
        for mover in self._movers.values():
            mover.sender.close()
            mover.receiver.close()

    # --- actions -----------------------------------------------------------------------------------------------

    def open_grant(self, action: OpenGrant) -> None:
        known = self._peers.get(action.peer)
        kind = known[1] if known is not None else next(iter(self._movers))
        self._grants[action.grant_key] = kind
        segments = block_segments(self.layout, self.card.num_blocks, action.blocks)
        self._movers[kind].receiver.grant(action.peer, action.grant_key, segments)

    def revoke_grant(self, action: RevokeGrant) -> None:
        kind = self._grants.pop(action.grant_key)
        self._movers[kind].receiver.revoke(action.grant_key)

    def push(self, action: PushSpan) -> None:
        known = self._peers.get(action.peer)
        if known is None:
            self._tell(events.WriteFinished(action.handoff_id, action.number, f"{action.peer} is not connected"))
            return
        card, kind = known
        try:
            source = span_segments(self.layout, self.card.num_blocks, action.source_blocks, action.span)
            target = span_segments(card.layout, action.destination_num_blocks, action.destination_blocks, action.span)
        except InternalFault as error:
            self._tell(events.WriteFinished(action.handoff_id, action.number, str(error)))
            return
        tag = msgspec.msgpack.encode(PushTag(action.span))
        write = Write(action.peer, action.grant_key, action.number, tag, source, target)
        self._movers[kind].sender.write(write)

    def stop_pushes(self, action: StopPushes) -> None:
        known = self._peers.get(action.peer)
        if known is None:  # disconnected: its writes have failed and nothing reads our blocks any more
            self._tell(events.WritesStopped(decode_grant_key(action.grant_key).handoff_id))
        else:
            self._movers[known[1]].sender.cancel(action.peer, action.grant_key)

    # --- transport threads -------------------------------------------------------------------------------------

    def _on_transport_event(self, event: TransportEvent) -> None:
        if isinstance(event, ConnectionLost):
            _log.info("data connection to %s lost: %s", event.peer, event.reason)
            return
        handoff_id = decode_grant_key(event.key).handoff_id
        match event:
            case WriteFinished():
                self._tell(events.WriteFinished(handoff_id, event.number, event.failure))
            case WriteLanded():
                self._tell(self._landed(handoff_id, event))
            case GrantFenced():
                self._tell(events.GrantFenced(handoff_id))
            case WritesStopped():
                self._tell(events.WritesStopped(handoff_id))

    def _landed(self, handoff_id: HandoffId, event: WriteLanded) -> events.WriteLanded:
        try:
            span = _TAG_DECODER.decode(event.tag).span
        except (msgspec.DecodeError, RecursionError) as error:
            return events.WriteLanded(handoff_id, Span(0, 0, 0, 0), f"unreadable tag: {error}")
        failure = event.failure
        if failure is None and self.layout.span_bytes(span) != event.num_bytes:
            failure = f"{event.num_bytes} bytes came for {span}, which takes {self.layout.span_bytes(span)}"
        return events.WriteLanded(handoff_id, span, failure)

    def _tell(self, event: events.Event) -> None:
        if self._post is not None:
            self._post(event)

    def check_invariants(self) -> None:
        for key, kind in self._grants.items():
            decode_grant_key(key)
            if kind not in self._movers:
                raise InternalFault(f"a grant is held on {kind}, which this worker does not have")
