"""What one worker's scheduler is told at its start."""

import msgspec

from disagg.core.ids import Incarnation, WorkerId
from disagg.core.roles import FirstToken, HandoffMode, Numerics, PartialStart, Role
from disagg.core.spans import KvLayout
from disagg.policy.batching import StepBudget
from disagg.policy.step_time import StepCosts


class SchedulerConfig(msgspec.Struct, frozen=True):
    """Limits and modes of one worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    model_digest: str
    numerics: Numerics
    layout: KvLayout
    num_blocks: int
    max_context: int  # tokens
    vocab_size: int
    budget: StepBudget
    step_costs: StepCosts | None = None  # what its steps are known to cost when it starts; it learns on from there
    handoff_mode: HandoffMode = HandoffMode.LAYERWISE
    partial_start: PartialStart = PartialStart.AUTO  # OFF also where the engine cannot run layers apart
    first_token: FirstToken = FirstToken.AT_ONCE  # of answers that are handed over
    min_push_bytes: int = 2 * 1024 * 1024  # smaller layer groups wait for the next layer
    max_push_bytes: int = 4 * 1024 * 1024  # larger spans are cut, so that hand-offs interleave
    lease_s: float = 30.0  # how long either end keeps things without hearing from the other
    answer_headroom: int = 64  # answer tokens that need room at admission; more is taken as the answer grows
    retry_s: float = 0.005  # before a peer that does not know the sequence yet is asked again; for an offer to be used
    starvation_s: float = 2.0  # a sequence refused room this long is not overtaken by any that came later
    grant_seed: bytes = b""  # secret of this incarnation behind its grants' capabilities; virtual worlds need none
    # What all tokens are that decide nothing, where nothing is computed: no rows for them. None: rows for all.
    sure_token_id: int | None = None
    reserve_ahead: int = 2  # step budgets of prompt work that may hold reservations at once
    grammar_timeout_s: float = 10.0  # for an answer's grammar to be prepared; others run meanwhile
