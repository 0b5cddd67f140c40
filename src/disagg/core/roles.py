"""What a worker is for and what it is asked to do with one sequence."""

import enum


class Role(enum.StrEnum):
    """What a worker does for its pool: a value of its configuration, not a class of its own."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Task(enum.StrEnum):
    """One worker's part in one sequence."""

    WHOLE = "whole"  # read the prompt and write the answer here
    PREFILL = "prefill"  # read the prompt, hand the KV to a peer
    DECODE = "decode"  # receive the KV from a peer, write the answer


class Numerics(enum.StrEnum):
    """The promise about tokens after a move. Part of pairing and of the block-hash seed."""

    EXACT = "exact"
    BOUNDED = "bounded"


class HandoffMode(enum.StrEnum):
    """When the prefill side sends: after each layer of each chunk, or once after the whole prompt."""

    LAYERWISE = "layerwise"
    SYNC = "sync"


class PartialStart(enum.StrEnum):
    """Whether a first step may begin, alone and layer by layer, while KV of its prompt is still on the wire."""

    AUTO = "auto"  # where the wire is to take longer than a step
    OFF = "off"


class FirstToken(enum.StrEnum):
    """Who tells the router the first token of an answer that is handed over, and when."""

    AT_ONCE = "at-once"  # the prefill worker, as soon as it has it
    STEADY = "steady"  # the decode worker, when the step for the second begins: that follows as all others do


# Which tasks each role takes from a router.
ROLE_TASKS: dict[Role, frozenset[Task]] = {
    Role.PREFILL: frozenset({Task.PREFILL}),
    Role.DECODE: frozenset({Task.WHOLE, Task.DECODE}),
    Role.MIXED: frozenset({Task.WHOLE}),
}
