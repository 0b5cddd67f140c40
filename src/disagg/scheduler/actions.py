"""What a worker's loop has to do. Imperative; carried out in order."""

import msgspec

from disagg.core.grammar import GrammarSpec
from disagg.core.ids import BlockId, HandoffId, WorkerId
from disagg.core.spans import Span
from disagg.protocol.messages import WorkerToRouter, WorkerToWorker
from disagg.scheduler.engine import StepPlan


class SendToRouter(msgspec.Struct, frozen=True):
    """Dropped when there is no router."""

    message: WorkerToRouter


class SendToPeer(msgspec.Struct, frozen=True):
    """Dropped when the peer's connection has ended: its loss is an event of its own."""

    peer: WorkerId
    message: WorkerToWorker


class RunStep(msgspec.Struct, frozen=True):
    """One at a time; answered by StepFinished or StepFailed."""

    plan: StepPlan


class PrepareGrammar(msgspec.Struct, frozen=True):
    """Beside the steps; answered by GrammarPrepared, unless it hangs."""

    attempt_id: HandoffId
    grammar: GrammarSpec
    emitted_ids: tuple[int, ...]


class OpenGrant(msgspec.Struct, frozen=True):
    """Let a peer write into these blocks, before it is told of them."""

    grant_key: bytes
    peer: WorkerId
    blocks: tuple[BlockId, ...]


class RevokeGrant(msgspec.Struct, frozen=True):
    """Answered by GrantFenced, always."""

    grant_key: bytes


class PushSpan(msgspec.Struct, frozen=True):
    """Write a span of my blocks into the peer's; answered by WriteFinished."""

    handoff_id: HandoffId
    peer: WorkerId
    grant_key: bytes
    number: int
    span: Span
    source_blocks: tuple[BlockId, ...]
    destination_blocks: tuple[BlockId, ...]
    destination_num_blocks: int  # size of the peer's arena


class StopPushes(msgspec.Struct, frozen=True):
    """Answered by WritesStopped, always."""

    grant_key: bytes
    peer: WorkerId


Action = SendToRouter | SendToPeer | RunStep | PrepareGrammar | OpenGrant | RevokeGrant | PushSpan | StopPushes
