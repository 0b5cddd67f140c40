"""One word of every kind that a worker can hear: from a peer, from its router, from its own engine and transport."""

from typing import Any

import msgspec
from tests.unit.scheduler.rigs import (
    PEER,
    PEER_INCARNATION,
    card,
    handoff,
    sequence_id,
)

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import Fence, Incarnation, StepId
from disagg.core.request import EmittedToken
from disagg.core.roles import Role
from disagg.core.spans import Span
from disagg.protocol.messages import (
    AbortSequence,
    AnnouncePeers,
    AnswerCluster,
    AnswerDrain,
    AnswerExamination,
    AnswerPairing,
    AnswerRegistration,
    AnswerReservation,
    Beat,
    CancelHandoff,
    FinishPrefill,
    HostLimits,
    OfferReservation,
    RenewLeases,
    RequestExamination,
    RequestPairing,
    RequestReservation,
    TakeHandoff,
    WorkerToWorker,
)
from disagg.scheduler import events
from disagg.scheduler.engine import StepResult

FROM_PEER: msgspec.msgpack.Decoder[WorkerToWorker] = msgspec.msgpack.Decoder(WorkerToWorker)
CANCELLED = Failure(FailureKind.CANCELLED, "scripted")
PROMPT = tuple(range(10))


NOBODY = 4321
STRANGE = Fence(Incarnation(1), Incarnation(2), 9)


def peer_messages(number: int, fence: Fence) -> dict[type, Any]:
    """One of each kind that a peer can send, about one hand-off."""
    which = handoff(number)
    own = card(PEER, PEER_INCARNATION, Role.DECODE)
    return {
        RequestPairing: RequestPairing(own),
        AnswerPairing: AnswerPairing(own),
        RequestReservation: RequestReservation(which, fence, 10),
        AnswerReservation: AnswerReservation(which, fence, CANCELLED),
        OfferReservation: OfferReservation(which, fence),
        FinishPrefill: FinishPrefill(which, fence, EmittedToken(sequence_id(number), 0, 7)),
        TakeHandoff: TakeHandoff(which, fence),
        CancelHandoff: CancelHandoff(which, fence, CANCELLED),
        RenewLeases: RenewLeases((which,), 9.0),
        RequestExamination: RequestExamination(),
        AnswerExamination: AnswerExamination(own, "1", HostLimits(-1, -1, 0, 1), 0.0, False, ()),
        Beat: Beat(2.5),
    }


def router_messages(number: int) -> dict[type, Any]:
    """StartSequence and DrainWorker are about somebody: the first repeats what is known, the second is no event."""
    return {
        AnswerRegistration: AnswerRegistration(Incarnation(5)),
        AnswerDrain: AnswerDrain(),
        AnswerCluster: AnswerCluster("1", ()),
        AnnouncePeers: AnnouncePeers(()),
        AbortSequence: AbortSequence(sequence_id(number), 1, "scripted"),
        Beat: Beat(2.5),
    }


def local_events(number: int) -> dict[type, events.Event]:
    """What the engine and the transport can say."""
    which, step = handoff(number), StepId(number)
    return {
        events.LayersComputed: events.LayersComputed(step, 1),
        events.StepFinished: events.StepFinished(StepResult(step, ()), 0.1),
        events.StepsFinished: events.StepsFinished(step, (0.1, 0.1)),
        events.StepFailed: events.StepFailed(step, CANCELLED),
        events.GrammarPrepared: events.GrammarPrepared(which),
        events.WriteFinished: events.WriteFinished(which, 0, None),
        events.WriteLanded: events.WriteLanded(which, Span(0, 10, 0, 3), None),
        events.GrantFenced: events.GrantFenced(which),
        events.WritesStopped: events.WritesStopped(which),
        events.PeerLost: events.PeerLost(PEER, Incarnation(78), "an earlier incarnation"),
    }
