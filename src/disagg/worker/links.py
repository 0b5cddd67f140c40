"""A worker's connections: one to its router, kept up for ever, and one to each peer.

router   dial until it answers (capped back-off), register, then messages until the connection is lost; again.
peers    the router says whom to meet; the source side dials, asks for pairing and reports what came of it.
         A peer that refuses is asked again only when its incarnation changes; one that is lost, while announced.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from disagg import __version__
from disagg.channel.channel import Channel, dial
from disagg.channel.keys import Keys
from disagg.channel.listening import Listener, listen
from disagg.channel.tally import Refusal
from disagg.core.endpoints import join_address, split_address
from disagg.core.errors import (
    ConfigurationError,
    Failure,
    FailureKind,
    InternalFault,
    PeerFault,
    PeerLost,
    ProtocolViolation,
)
from disagg.core.ids import WorkerId
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import (
    AnnouncePeers,
    AnswerExamination,
    AnswerPairing,
    AnswerRegistration,
    LinkReport,
    LinkState,
    RegisterWorker,
    ReportPairing,
    RequestExamination,
    RequestPairing,
    RouterToWorker,
    WorkerToWorker,
)
from disagg.protocol.pairing import pairing_failure
from disagg.scheduler.events import PeerLost as PeerWasLost
from disagg.scheduler.events import PeerMessageReceived, PeerPaired, RouterLost, RouterMessageReceived
from disagg.telemetry.metrics import DATA_REFUSED, PAIRINGS_REFUSED, PEERS_REFUSED
from disagg.worker.examination import host_limits
from disagg.worker.survey import Survey, Way
from disagg.worker.worker import Worker

_log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.1
MAX_RETRY_S = 2.0
MIN_HELD_S = 2.0  # a connection that breaks sooner was none to dial again at once
REPORT_INTERVAL_S = 0.25  # between two reports of this worker's state

_FROM_ROUTER: msgspec.msgpack.Decoder[RouterToWorker] = msgspec.msgpack.Decoder(RouterToWorker)
_FROM_PEER: msgspec.msgpack.Decoder[WorkerToWorker] = msgspec.msgpack.Decoder(WorkerToWorker)


def _has_held(since_s: float) -> bool:
    """Whether a connection made then was one to dial again at once."""
    return time.monotonic() - since_s > MIN_HELD_S


class _Link:
    """One open connection to a peer. `lost` is set when it is over, however that came."""

    def __init__(self, card: WorkerCard, channel: Channel[WorkerToWorker], way: Way) -> None:
        self.card = card
        self.channel = channel
        self.way = way
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class PeerLinks:
    """Connections to other workers, in both directions of dialling."""

    def __init__(
        self,
        worker: Worker,
        card: WorkerCard,
        beat_interval_s: float,
        *,
        keys: Keys | None = None,
        probe_s: float = 0.0,
        link_gbits: float = 0.0,
    ) -> None:
        """probe_s, link_gbits: as in WorkerConfig."""
        self.card = card  # with the control address, once listening
        self._keys = keys
        self._worker = worker
        worker.link_states = self._link_states
        self._survey = Survey(
            worker.courier,
            worker.scheduler.counters,
            probe_s=probe_s,
            link_gbits=link_gbits,
            is_encrypted=keys is not None,
        )
        self._beat_interval_s = beat_interval_s
        self._server: Listener | None = None
        self._links: dict[WorkerId, _Link] = {}
        self._dials: dict[WorkerId, tuple[WorkerCard, asyncio.Task[None]]] = {}
        self._refusals: dict[WorkerId, ReportPairing] = {}  # of the announced incarnations
        self._closing: set[asyncio.Task[None]] = set()
        self._measuring: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.report: Callable[[ReportPairing], None] = lambda report: None

    async def listen(self, host: str) -> None:
        tls = self._keys.accepting if self._keys else None
        self._server = await listen(host, 0, _FROM_PEER, self._welcome, tls=tls)
        bound_host, port = split_address(self._server.address)
        self._survey.expect_from(bound_host)
        # As it was named, not as it is bound: the name is what stands in its certificate.
        self.card = msgspec.structs.replace(self.card, control_address=join_address(host, port))

    def announce(self, cards: tuple[WorkerCard, ...]) -> None:
        """Meet these and say how it stands with each; let go of those dialled before that are not named any more."""
        wanted = {card.worker_id: card for card in cards}
        for worker_id, (card, task) in list(self._dials.items()):
            if wanted.get(worker_id) != card:
                task.cancel()
                del self._dials[worker_id]
                self._refusals.pop(worker_id, None)
                link = self._links.get(worker_id)
                if link is not None:
                    self._let_go(link, "the router does not name it any more")
        for card in cards:
            link = self._links.get(card.worker_id)
            if card.worker_id not in self._dials:
                self._dials[card.worker_id] = (card, asyncio.create_task(self._meet(card)))
            elif card.worker_id in self._refusals:
                self.report(self._refusals[card.worker_id])
            elif link is not None and link.card.incarnation == card.incarnation:
                self.report(ReportPairing(card.worker_id, card.incarnation, None))

    async def examine(self) -> tuple[LinkReport, ...]:
        """Every link measured anew, and why others are not there."""
        for link in list(self._links.values()):
            await self._measure(link)
        refused = tuple(LinkReport(report.peer, failure=report.failure) for report in self._refusals.values())
        return (*(link.way.report for link in self._links.values()), *refused)

    def take_refusals(self) -> dict[Refusal, int]:
        """Control connections turned away since this was last asked."""
        return self._server.refused.take() if self._server is not None else {}

    async def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for task in (*(task for _, task in self._dials.values()), *self._measuring):
            task.cancel()
        for link in list(self._links.values()):
            self._let_go(link, "this worker ends")
        await asyncio.gather(*self._closing, return_exceptions=True)

    def check_invariants(self) -> None:
        for worker_id, link in self._links.items():
            if link.card.worker_id != worker_id or link.lost.done():
                raise InternalFault(f"the link to {worker_id} is over or somebody else's")

    async def _meet(self, card: WorkerCard) -> None:
        """Dial, pair and report; again after every loss, as long as the peer is announced."""
        failure = pairing_failure(self.card, card)
        wait_s = FIRST_RETRY_S
        while failure is None:
            try:
                lost, since_s = await self._pair(card), time.monotonic()
                reason = await asyncio.shield(lost)
                if _has_held(since_s):
                    wait_s = FIRST_RETRY_S
                self.report(ReportPairing(card.worker_id, card.incarnation, Failure(FailureKind.WORKER_LOST, reason)))
            except ConfigurationError as error:  # refused for good
                failure = Failure(FailureKind.INVALID_REQUEST, str(error))
                break
            except PeerFault as error:
                _log.info("%s: %s; trying again in %.1f s", card.worker_id, error, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)
        _log.warning("%s", failure.message)
        self._worker.scheduler.counters.add(PAIRINGS_REFUSED)
        self._refusals[card.worker_id] = ReportPairing(card.worker_id, card.incarnation, failure)
        self.report(self._refusals[card.worker_id])

    async def _pair(self, card: WorkerCard) -> asyncio.Future[str]:
        """Raises PeerFault, or ConfigurationError when the peer refuses. The future is set when the peer is lost."""
        tls = self._keys.dialling if self._keys else None
        channel = await dial(card.control_address, _FROM_PEER, timeout_s=HANDSHAKE_TIMEOUT_S, tls=tls)
        try:
            channel.send(RequestPairing(self._worker.courier.card_for(self.card, card)))
            answer = await channel.receive(HANDSHAKE_TIMEOUT_S)
            if not isinstance(answer, AnswerPairing):
                raise ProtocolViolation(f"{card.worker_id} answered pairing with {type(answer).__name__}")
            if answer.card.incarnation != card.incarnation:
                raise PeerLost(f"{card.worker_id} is incarnation {answer.card.incarnation:x} by now")
            if answer.failure is not None:
                raise ConfigurationError(answer.failure.message)
            way = await self._survey.choose(answer.card)
        except BaseException:
            await channel.close()
            raise
        link = self._attach(answer.card, channel, way)
        self.report(ReportPairing(card.worker_id, card.incarnation, None))
        return link.lost

    async def _welcome(self, channel: Channel[WorkerToWorker]) -> None:
        """A peer has dialled."""
        try:
            request = await channel.receive(HANDSHAKE_TIMEOUT_S)
            if isinstance(request, RequestExamination):
                await self._answer_examination(channel)
                return
            if not isinstance(request, RequestPairing) or self._is_closed:
                raise ProtocolViolation(f"{type(request).__name__} before pairing, or too late")
        except PeerFault as error:
            _log.info("connection from %s refused: %s", channel.peer_address, error)
            await channel.close()
            return
        failure = pairing_failure(request.card, self.card)
        if failure is not None:
            channel.send(AnswerPairing(self.card, failure))
            _log.warning("%s", failure.message)
            self._worker.scheduler.counters.add(PAIRINGS_REFUSED)
            await channel.close()
            return
        try:
            way = await self._survey.choose(request.card)  # before the answer: whoever has it may send us work at once
        except BaseException:
            await channel.close()
            raise
        if self._is_closed:
            await channel.close()
            return
        channel.send(AnswerPairing(self._worker.courier.card_for(self.card, request.card), None))
        self._attach(request.card, channel, way)

    async def _answer_examination(self, channel: Channel[WorkerToWorker]) -> None:
        links = await self.examine()
        answer = AnswerExamination(self.card, __version__, host_limits(), time.time(), self._keys is not None, links)
        channel.send(answer)
        await channel.close()

    async def _measure(self, link: _Link) -> None:
        link.way = await self._survey.measure(link.card, link.way)
        if not link.lost.done():
            self._worker.handle(PeerPaired(link.card, link.way.report.bytes_per_s))

    def _link_states(self) -> tuple[LinkState, ...]:
        return tuple(link.way.state for link in self._links.values())

    def _attach(self, card: WorkerCard, channel: Channel[WorkerToWorker], way: Way) -> _Link:
        previous = self._links.get(card.worker_id)
        if previous is not None:
            self._let_go(previous, "replaced by a newer connection")
        link = self._links[card.worker_id] = _Link(card, channel, way)
        self._worker.attach_peer(card, channel.send, way.kind)
        self._worker.handle(PeerPaired(card, way.report.bytes_per_s))
        channel.start(
            beat_interval_s=self._beat_interval_s,
            on_message=lambda message: self._worker.handle(PeerMessageReceived(card.worker_id, message)),
            on_lost=lambda reason: self._let_go(link, reason),
        )
        if len(way.report.rates) < 2:  # otherwise it was measured before
            task = asyncio.create_task(self._measure(link))
            self._measuring.add(task)
            task.add_done_callback(self._measuring.discard)
        return link

    def _let_go(self, link: _Link, reason: str) -> None:
        """The end of a link, once: the worker hears of it before anything newer is attached."""
        if link.lost.done():
            return
        link.lost.set_result(reason)
        del self._links[link.card.worker_id]
        self._worker.handle(PeerWasLost(link.card.worker_id, link.card.incarnation, reason))
        self._worker.detach_peer(link.card.worker_id)
        task = asyncio.get_running_loop().create_task(link.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class RouterLink:
    """The connection to the router, kept up until the worker stops."""

    def __init__(
        self, worker: Worker, peers: PeerLinks, address: str, beat_interval_s: float, keys: Keys | None = None
    ) -> None:
        self._tls = keys.dialling if keys else None
        self._worker = worker
        self._peers = peers
        self._address = address
        self._beat_interval_s = beat_interval_s
        self._channel: Channel[RouterToWorker] | None = None

    async def run(self) -> None:
        """Never returns; raises ConfigurationError when the router refuses this worker for good."""
        wait_s, told = FIRST_RETRY_S, ""
        while True:
            try:
                lost, since_s, told = await self._register(), time.monotonic(), ""
                reason = await lost
                if _has_held(since_s):
                    wait_s = FIRST_RETRY_S
                _log.warning("router %s lost: %s", self._address, reason)
            except PeerFault as error:
                if str(error) != told:  # say it once, not at every try
                    told = str(error)
                    _log.info("router: %s; trying on", error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    async def report_states(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            counters = self._worker.scheduler.counters
            for reason, count in self._peers.take_refusals().items():
                counters.add(PEERS_REFUSED, count, label=reason.value)
            for reason, count in self._worker.courier.take_refusals().items():
                counters.add(DATA_REFUSED, count, label=reason.value)
            self._worker.report_state()

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _register(self) -> asyncio.Future[str]:
        """Raises PeerFault, or ConfigurationError when refused. The future is set when the router is lost."""
        channel = await dial(self._address, _FROM_ROUTER, timeout_s=HANDSHAKE_TIMEOUT_S, tls=self._tls)
        try:
            channel.send(RegisterWorker(self._peers.card, self._worker.scheduler.is_draining))
            answer = await channel.receive(HANDSHAKE_TIMEOUT_S)
            if not isinstance(answer, AnswerRegistration):
                raise ProtocolViolation(f"the router answered registration with {type(answer).__name__}")
            if answer.failure is not None and answer.failure.kind is FailureKind.INVALID_REQUEST:
                raise ConfigurationError(f"the router refuses this worker: {answer.failure.message}")
            if answer.failure is not None:
                raise PeerLost(answer.failure.message)
        except BaseException:
            with contextlib.suppress(OSError):
                await channel.close()
            raise
        # Names of its requests begin with its incarnation: lines about them say which router's they are.
        _log.info("registered with router %x at %s", answer.router, self._address)
        return self._attach(channel)

    def _attach(self, channel: Channel[RouterToWorker]) -> asyncio.Future[str]:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_lost(reason: str) -> None:
            self._channel = None
            self._worker.attach_router(None)
            self._worker.handle(RouterLost())
            if not lost.done():
                lost.set_result(reason)

        def on_message(message: RouterToWorker) -> None:
            if isinstance(message, AnnouncePeers):
                self._peers.announce(message.peers)
            else:
                self._worker.handle(RouterMessageReceived(message))

        self._channel = channel
        self._worker.attach_router(channel.send)
        self._peers.report = channel.send
        channel.start(
            beat_interval_s=self._beat_interval_s,
            on_message=on_message,
            on_lost=on_lost,
        )
        self._worker.report_state()
        return lost
