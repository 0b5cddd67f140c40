"""Workers whose arithmetic differs in the last bits: what was sent stays, and what follows is near the reference.

Every incarnation breaks near ties its own way, as machines with other instruction sets do: of the two candidates that
the KV gives for a position it takes the one its own bias prefers. So a moved sequence goes on differently than it would
have, and the rule of `bounded` numerics is all that can hold: a token that a client has seen never changes, and each
token is one of the two candidates that follow from the very tokens before it.
"""

import random
from collections.abc import Iterator
from functools import partial
from itertools import count

import pytest

from disagg.core.ids import SequenceId
from disagg.core.request import EmittedToken, SamplingParams
from disagg.core.roles import Role
from disagg.core.spans import KvLayout
from disagg.dispatch.stream import GenerateRequest
from disagg.scheduler.engine import StepRow
from disagg.testing import virtual_worker
from disagg.testing.engine import FakeEngine, expected_tokens
from disagg.testing.virtual import MODEL, Answer, VirtualCluster

VOCAB = 1000
MARGIN = 1  # the second candidate is the next token id


class DriftingEngine(FakeEngine):
    """Takes the second candidate at every third position or so, each instance at others."""

    biases: Iterator[int] = count()

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks, VOCAB)
        self._bias = next(self.biases)

    def _sample(self, row: StepRow, sampling: SamplingParams, seen: bytes) -> EmittedToken:
        token = super()._sample(row, sampling, seen)
        takes_second = (token.token_id + self._bias) % 3 == 0
        return EmittedToken(token.sequence_id, token.position, (token.token_id + takes_second * MARGIN) % VOCAB)


def check_teacher_forced(cluster: VirtualCluster, sequence_id: SequenceId, answer: Answer) -> int:
    """Each token against the reference for exactly the tokens before it; how many are second candidates."""
    layout = next(iter(cluster.workers.values())).card.layout
    tokens, num_second = answer.tokens[sequence_id.choice], 0
    for index, token in enumerate(tokens):
        known = (*answer.request.prompt_ids, *tokens[:index])
        reference = expected_tokens(layout, sequence_id, known, SamplingParams(max_tokens=1, temperature=0.0))[0]
        assert token in (reference, (reference + MARGIN) % VOCAB), (index, token, reference, cluster.time.story())
        num_second += token != reference
    return num_second


@pytest.mark.parametrize("seed", range(20))
def test_what_was_sent_stays_and_what_follows_is_near(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_worker, "FakeEngine", DriftingEngine)
    monkeypatch.setattr(DriftingEngine, "biases", count())  # whatever ran before in this process
    rng = random.Random(seed)
    cluster = VirtualCluster(seed, local_prefill_tokens=rng.choice([0, 20]))
    for index in range(2):
        cluster.start_worker(f"decode-{index}", Role.DECODE)
        cluster.start_worker(f"prefill-{index}", Role.PREFILL)
    cluster.time.run(until=lambda: cluster.is_ready)
    for _ in range(12):
        prompt = tuple(rng.randrange(900) for _ in range(rng.randint(1, 50)))
        request = GenerateRequest(MODEL, prompt, SamplingParams(max_tokens=rng.randint(4, 20), temperature=0.0))
        cluster.time.after(rng.uniform(0, 0.5), partial(cluster.submit, request))
    for role in ("decode", "prefill"):
        cluster.time.after(rng.uniform(0.05, 0.6), partial(cluster.kill, f"{role}-{rng.randrange(2)}"))
    cluster.time.run(until=lambda: len(cluster.answers) == 12 and cluster.are_all_over)
    num_second = 0
    for request_id, answer in cluster.answers.items():
        assert answer.error is None
        assert len(answer.tokens[0]) == answer.request.sampling.max_tokens
        num_second += check_teacher_forced(cluster, SequenceId(request_id, 0), answer)
    assert num_second, "no worker drifted: this schedule shows nothing"
    cluster.check_nothing_left()
