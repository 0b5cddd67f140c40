"""How fast the ways from this worker to its peers are: measured one at a time, judged, and one chosen per peer.

A peer with which two transports or more are common is measured before it is attached, and the choice is kept as long as
that connection is: a write must not be repeated over another kind while its first bytes may still be under way.
"""

import asyncio
import logging

import msgspec

from disagg.core.endpoints import TransportKind, TransportRate
from disagg.core.errors import Failure, FailureKind, PeerFault
from disagg.core.ids import WorkerId
from disagg.policy.transport_choice import TransportDecision, choose_transport
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import LinkReport, LinkState
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import SLOW_LINKS, TRANSPORTS_CHOSEN
from disagg.transport.probe import Measured
from disagg.worker.courier import Courier
from disagg.worker.examination import BYTES_PER_GBIT, copied_bytes_per_s, expected_bytes_per_s, slowness

_log = logging.getLogger(__name__)

CHOICE_TIMEOUT_S = 0.5  # for all kinds of one peer, which is on this machine; the peer waits meanwhile


class Way(msgspec.Struct, frozen=True):
    """How KV gets to one peer, and what is known of that."""

    decision: TransportDecision
    report: LinkReport

    @property
    def kind(self) -> TransportKind:
        return self.decision.kind

    @property
    def state(self) -> LinkState:
        """As routers are told it."""
        return LinkState(self.report.peer, 0.0, self.kind.value, self.report.bytes_per_s)


class Survey:
    """Used on the loop's thread; probes run on others."""

    def __init__(
        self, courier: Courier, counters: Counters, *, probe_s: float, link_gbits: float, is_encrypted: bool
    ) -> None:
        """probe_s: for all kinds and both directions of one pair; 0: not measured. link_gbits: as in WorkerConfig."""
        self._courier = courier
        self._counters = counters
        self._probe_s = probe_s
        self._link_gbits = link_gbits
        self._is_encrypted = is_encrypted
        self._tcp_bytes_per_s = 0.0  # what tcp should give
        self._one_at_a_time = asyncio.Lock()  # two probes at once would each see half a link

    def expect_from(self, host: str) -> None:
        """Peers are reached from this address."""
        self._tcp_bytes_per_s = expected_bytes_per_s(host, self._link_gbits)

    async def choose(self, card: WorkerCard) -> Way:
        """How KV is to get to a peer that is being paired. Nothing is measured yet where there is no choice."""
        kinds = self._courier.kinds_to(card)
        if len(kinds) < 2:
            rates = tuple(TransportRate(kind) for kind in kinds)
        else:
            try:
                async with self._one_at_a_time, asyncio.timeout(CHOICE_TIMEOUT_S):
                    rates = await self._rates(card, kinds, self._probe_s / 2)  # the peer measures in the other half
            except TimeoutError:
                failure = f"not measured within {CHOICE_TIMEOUT_S:g} s"
                rates = tuple(TransportRate(kind, failure=failure) for kind in kinds)
        decision = choose_transport(rates)
        self._counters.add(TRANSPORTS_CHOSEN, label=decision.reason.value)
        return self._judged(card.worker_id, rates, decision)

    async def measure(self, card: WorkerCard, way: Way) -> Way:
        """Everything anew, but for the choice."""
        async with self._one_at_a_time:
            rates = await self._rates(card, self._courier.kinds_to(card), self._probe_s)
        return self._judged(card.worker_id, rates, way.decision)

    async def _rates(
        self, card: WorkerCard, kinds: tuple[TransportKind, ...], budget_s: float
    ) -> tuple[TransportRate, ...]:
        return tuple([await self._rate(card, kind, budget_s / len(kinds)) for kind in kinds])

    async def _rate(self, card: WorkerCard, kind: TransportKind, budget_s: float) -> TransportRate:
        """Never raises for what is wrong with the link."""
        if not budget_s:
            return TransportRate(kind)
        loop = asyncio.get_running_loop()
        try:
            measured: Measured | None = await loop.run_in_executor(None, self._courier.measure, card, kind, budget_s)
        except (PeerFault, OSError) as error:
            return TransportRate(kind, failure=str(error))
        if measured is None:
            return TransportRate(kind)
        expected = self._tcp_bytes_per_s
        if kind is TransportKind.SHARED_MEMORY:
            expected = await loop.run_in_executor(None, copied_bytes_per_s)
        return TransportRate(kind, measured.bytes_per_s, measured.latency_s, expected)

    def _judged(self, peer: WorkerId, rates: tuple[TransportRate, ...], decision: TransportDecision) -> Way:
        """Logs what was measured, and warns of a link that is far too slow."""
        (taken,) = [rate for rate in rates if rate.kind is decision.kind]
        failure = None
        if taken.failure:
            failure = Failure(FailureKind.TRANSFER_FAILED, f"{peer} could not be measured: {taken.failure}")
        for rate in rates:
            if rate.bytes_per_s:
                gbits = rate.bytes_per_s / BYTES_PER_GBIT
                there_ms = 1e3 * rate.latency_s
                _log.info("%s: %s, %.2g Gbit/s, %.2g ms there and back", peer, rate.kind, gbits, there_ms)
        if slow := slowness(taken.bytes_per_s, taken.expected_bytes_per_s):
            self._counters.add(SLOW_LINKS, label=taken.kind.value)
            _log.warning("%s: %s gives only %s; see disagg doctor", peer, taken.kind, slow)
        report = LinkReport(
            peer,
            taken.kind.value,
            self._is_encrypted,
            taken.bytes_per_s,
            taken.latency_s,
            taken.expected_bytes_per_s,
            failure,
            decision.reason.value,
            rates,
        )
        return Way(decision, report)
