"""Steady states that need no simulation."""

from disagg.sim.hardware.step_model import StepModel, StepShape


def closed_loop_tpot_s(model: StepModel, prompt: int, answer: int, concurrency: int) -> float:
    """Mean time per output token of one mixed worker that always serves `concurrency` requests.

    While an answer is written, each of the others starts once: a stream waits for concurrency / answer prompts per
    token of its own. Prompts join decoding steps, so they add what a mixed step takes longer. prompt and answer count
    tokens.
    """
    streams = StepShape(decode_contexts_sum=concurrency * (prompt + answer // 2), num_decode=concurrency)
    mixed = StepShape(((prompt, 0),), streams.decode_contexts_sum, streams.num_decode)
    alone = model.step_s(streams)
    return alone + concurrency / answer * (model.step_s(mixed) - alone)
