"""Steady states that need no simulation."""

from disagg.sim.hardware.step_model import StepModel, StepShape

ROUNDS = 10  # of streams that follow from TPOT, and TPOT from streams


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


def wave_tpot_s(model: StepModel, prompt: int, answer: int, concurrency: int, batch_tokens: int) -> float:
    """The same of a worker that reads prompts alone, batch_tokens at a time, before any stream goes on.

    Of equal lengths all answers of the loop begin and end together: a stream waits once, for the prompts read after its
    own, and then only streams run.
    """
    most = max(1, batch_tokens // prompt)
    sizes = [min(most, concurrency - done) for done in range(0, concurrency, most)]
    waited_s = left_s = 0.0
    for size in reversed(sizes):
        waited_s += size * left_s
        left_s += model.step_s(StepShape(((prompt, 0),) * size))
    streams = StepShape(decode_contexts_sum=concurrency * (prompt + answer // 2), num_decode=concurrency)
    return model.step_s(streams) + waited_s / concurrency / (answer - 1)


def decode_tpot_s(model: StepModel, prompt: int, answer: int, places: float, away_s: float) -> float:
    """Mean time per output token of a decode worker, or of one rank of it, with so many places of a closed loop.

    A place is empty for away_s, the TTFT, before each answer.
    """
    tpot_s = 0.0
    for _ in range(ROUNDS):
        streams = max(1, round(places * _written_share(tpot_s * (answer - 1), away_s)))
        tpot_s = model.step_s(StepShape((), streams * (prompt + answer // 2), streams))
    return tpot_s


def _written_share(answer_s: float, away_s: float) -> float:
    return answer_s / (answer_s + away_s) if answer_s else 1.0
