"""A scenario's workers and router as the serving code is told of them."""

import msgspec

from disagg.bench.workload import ANSWER_LABEL
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.core.roles import Numerics
from disagg.dispatch.config import DispatcherConfig
from disagg.policy.batching import StepBudget
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.scheduler.config import SchedulerConfig
from disagg.sim.scenario import Fidelity, Scenario, WorkerSpec

VOCAB_SIZE = 1 << 62  # every label is a token id


def dispatcher_config(scenario: Scenario) -> DispatcherConfig:
    return DispatcherConfig(
        incarnation=Incarnation(0),
        tokenizer_digests={model: model for model in scenario.models},
        local_prefill_tokens=scenario.local_prefill_tokens,
        max_open_requests=scenario.max_open_requests,
        max_claimed_share=scenario.max_claimed_share,
        recovery=scenario.recovery,
    )


def card_and_config(
    spec: WorkerSpec, scenario: Scenario, incarnation: Incarnation
) -> tuple[WorkerCard, SchedulerConfig]:
    """At large fidelity a chunk, or a cached prefix, is one push, and tokens that decide nothing have no rows."""
    layout, num_blocks = spec.layout, spec.blocks()
    pool = PoolCard(spec.model, spec.model, spec.model, Numerics.EXACT, VOCAB_SIZE, spec.max_context)
    endpoints = (Endpoint(TransportKind.TCP, f"{spec.name}:1"),)
    name = WorkerId(spec.name)
    card = WorkerCard(name, incarnation, spec.role, pool, layout, num_blocks, spec.name, endpoints)
    config = SchedulerConfig(
        worker_id=name,
        incarnation=incarnation,
        role=spec.role,
        model_digest=spec.model,
        numerics=Numerics.EXACT,
        layout=layout,
        num_blocks=num_blocks,
        max_context=spec.max_context,
        vocab_size=VOCAB_SIZE,
        budget=StepBudget(
            spec.chunk_tokens, spec.mixed_chunk_tokens, spec.max_running, spec.itl_target_s, spec.prompts_alone
        ),
        step_costs=spec.step_costs,
        handoff_mode=spec.handoff_mode,
        partial_start=spec.partial_start,
        min_push_bytes=spec.min_push_bytes,
        lease_s=spec.lease_s,
        answer_headroom=spec.answer_headroom,
    )
    if scenario.fidelity is Fidelity.LARGE:
        token_id = ANSWER_LABEL if scenario.max_alike_steps > 1 else None
        config = msgspec.structs.replace(config, max_push_bytes=1 << 62, sure_token_id=token_id)
    return card, config
