"""All links of one cluster: one between each worker and the router, one between each two workers.

Workers dial `router_address(worker_id)`. Cards of peers that pass through are rewritten, so that peers dial links too:

    AnnouncePeers    router -> worker     the addresses of a peer become those of the link worker -> peer
    RequestPairing   source -> peer       the source's, those of the link peer -> source
    AnswerPairing    peer -> source       the peer's, those of the link source -> peer
"""

import random
from functools import partial
from typing import NamedTuple

import msgspec

from disagg.core.endpoints import TransportKind
from disagg.core.errors import InternalFault
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import AnnouncePeers, AnswerPairing, Message, RequestPairing
from disagg.testing.faulty_link import FaultyLink, LinkCounts, LinkFaults, LinkKind

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()
_TAGS = (b"announce_peers", b"request_pairing", b"answer_pairing")
_TAG_BYTES = 24  # of a message's start: the array's head and its tag


class PairLink(NamedTuple):
    """From one worker to another: the connection of their messages, and that of KV."""

    control: FaultyLink
    data: FaultyLink


class ClusterLinks:
    """Made inside a running loop; end it with close(). Two workers get their link when they hear of each other."""

    def __init__(self, seed: int) -> None:
        self.control_address = ""  # of the router, once it listens
        self._seed = seed
        self._to_router: dict[str, FaultyLink] = {}
        self._between: dict[tuple[str, str], PairLink] = {}

    def router_address(self, worker_id: str) -> str:
        """Where this worker finds the router."""
        return self.to_router(worker_id).address

    def to_router(self, worker_id: str) -> FaultyLink:
        if worker_id not in self._to_router:
            link = self._link(f"{worker_id}>router", LinkKind.CONTROL)
            link.rewrite = partial(self._from_router, worker_id)
            self._to_router[worker_id] = link
        self._to_router[worker_id].upstream = self.control_address
        return self._to_router[worker_id]

    def between(self, source: str, peer: str) -> PairLink:
        """The link on which `source` dials `peer`."""
        if (source, peer) not in self._between:
            name = f"{source}>{peer}"
            pair = PairLink(self._link(name, LinkKind.CONTROL), self._link(f"{name} data", LinkKind.DATA))
            pair.control.rewrite = partial(self._between_workers, source, peer)
            self._between[source, peer] = pair
        return self._between[source, peer]

    def pairs(self) -> list[tuple[str, str]]:
        """(who dials, whom) of all workers that have exchanged messages."""
        return sorted(pair for pair, links in self._between.items() if links.control.counts.num_connections)

    def set(self, source: str, peer: str, faults: LinkFaults) -> None:
        """Of everything between two workers, or a worker and "router"."""
        links = (self.to_router(source),) if peer == "router" else self.between(source, peer)
        for link in links:
            link.set(faults)

    def counts(self) -> LinkCounts:
        """Of all links together."""
        totals = LinkCounts()
        for link in self._links():
            for name in LinkCounts.__struct_fields__:
                setattr(totals, name, getattr(totals, name) + getattr(link.counts, name))
        return totals

    async def close(self) -> None:
        """Idempotent."""
        for link in self._links():
            await link.close()

    def check_invariants(self) -> None:
        for link in self._links():
            link.check_invariants()
        for (source, peer), pair in self._between.items():
            if source == peer or pair.control.name != f"{source}>{peer}":
                raise InternalFault(f"the link {pair.control.name} is filed under {source}>{peer}")

    def _links(self) -> list[FaultyLink]:
        return [*self._to_router.values(), *(link for pair in self._between.values() for link in pair)]

    def _link(self, name: str, kind: LinkKind) -> FaultyLink:
        return FaultyLink(name, kind, random.Random(f"{self._seed} {name}"))

    # --- rewriting ---------------------------------------------------------------------------------------------

    def _from_router(self, worker_id: str, payload: bytes, is_up: bool) -> bytes:
        message = _decoded(payload)
        if not isinstance(message, AnnouncePeers):
            return payload
        peers = tuple(self._behind_link(worker_id, card) for card in message.peers)
        return _ENCODER.encode(AnnouncePeers(peers))

    def _between_workers(self, source: str, peer: str, payload: bytes, is_up: bool) -> bytes:
        message = _decoded(payload)
        if isinstance(message, RequestPairing):
            return _ENCODER.encode(RequestPairing(self._behind_link(peer, message.card)))
        if isinstance(message, AnswerPairing):
            card = self._behind_link(source, message.card)
            return _ENCODER.encode(msgspec.structs.replace(message, card=card))
        return payload

    def _behind_link(self, dialler: str, card: WorkerCard) -> WorkerCard:
        """The card as the dialler is to see it. The link learns where the addresses of this incarnation are."""
        pair = self.between(dialler, card.worker_id)
        pair.control.upstream = card.control_address
        endpoints = []
        for endpoint in card.data_endpoints:
            if endpoint.kind is TransportKind.TCP:
                pair.data.upstream = endpoint.address
                endpoint = msgspec.structs.replace(endpoint, address=pair.data.address)
            endpoints.append(endpoint)
        return msgspec.structs.replace(card, control_address=pair.control.address, data_endpoints=tuple(endpoints))


def _decoded(payload: bytes) -> Message | None:
    """A message that may carry cards; None for all others, which pass as they are."""
    if not any(tag in payload[:_TAG_BYTES] for tag in _TAGS):
        return None
    try:
        return _DECODER.decode(payload)
    except msgspec.DecodeError:
        return None
