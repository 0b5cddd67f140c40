"""Workers as they are started here, on the hardware that was profiled here."""

from disagg.sim.hardware.fitted import FittedModel, Profile
from disagg.sim.scenario import MAX_CONTEXT, Link, WorkerSpec
from disagg.worker.config import WorkerConfig

COPY_BYTES_S = 1e10  # neighbours copy into each other's memory; what a hand-off takes is in the profile


def profiled_worker(config: WorkerConfig, profile: Profile, machine: str = "here") -> WorkerSpec:
    """The simulated form of a worker: its limits as configured, its steps and hand-offs as they were served.

    It has served for so long that it knows what its steps cost. The scenario's contention and request_s are those of
    `profile.serving`.
    """
    serving = profile.serving
    return WorkerSpec(
        name=config.worker_id,
        role=config.role,
        steps=FittedModel(profile),
        machine=machine,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_context=config.max_context or MAX_CONTEXT,
        chunk_tokens=config.chunk_tokens,
        mixed_chunk_tokens=config.mixed_chunk_tokens,
        itl_target_s=config.itl_target_s,
        step_costs=profile.costs if serving is None else serving.costs,
        max_running=config.max_running,
        handoff_mode=config.handoff,
        min_push_bytes=config.min_push_bytes,
        lease_s=config.lease_s,
        nic=Link(COPY_BYTES_S, 0.0 if serving is None else serving.handoff_s),
    )
