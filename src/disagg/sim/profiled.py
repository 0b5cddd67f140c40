"""Workers as they are started here, on the hardware that was profiled here."""

from disagg.sim.hardware.fitted import FittedModel, Profile
from disagg.sim.scenario import MAX_CONTEXT, Link, WorkerSpec
from disagg.worker.config import WorkerConfig

COPY_BYTES_S = 1e10  # neighbours copy into each other's memory; what a hand-off takes is in the profile


def profiled_worker(config: WorkerConfig, profile: Profile, machine: str = "here") -> WorkerSpec:
    """The simulated form of a worker: its limits as configured, its steps and hand-offs as they were served.

    The scenario's contention and request_s are those of `profile.serving`.
    """
    handoff_s = profile.serving.handoff_s if profile.serving is not None else 0.0
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
        max_running=config.max_running,
        handoff_mode=config.handoff,
        min_push_bytes=config.min_push_bytes,
        lease_s=config.lease_s,
        nic=Link(COPY_BYTES_S, handoff_s),
    )
