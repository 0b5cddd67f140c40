"""The same tokens on every path, and those a reference implementation would choose.

    mixed       one worker reads the prompt and writes the answer
    layerwise   a prefill worker hands the KV over TCP while it computes it
    sync        the same, after the whole prompt
    local       a decode worker reads the prompt itself

Real processes, token ids in over HTTP, token ids out by their spelling. What each path did is read from /metrics.
"""

import enum
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.e2e.cluster import Front, Readings
from tests.parity.prompts import BORDERS, CHUNK, CHUNK_BORDERS, LONG, Prompt, Spelling, make_prompts
from tests.parity.reference import Reference

from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.telemetry import metrics as table
from disagg.testing.processes import Serve

NUM_TOKENS = 64
NUM_AT_ONCE = 8
NUM_SAMPLED = 2  # prompts
NUM_NEAR_TIES_ALLOWED = 1  # prompts of a full set
PAIR = ("--prefill", "1", "--decode", "1")


class Way(enum.Enum):
    """A path through the cluster, and what `disagg serve` must be told to take it."""

    MIXED = ("--mixed", "1")
    LAYERWISE = (*PAIR, "--local-prefill-tokens", "0")
    SYNC = (*PAIR, "--local-prefill-tokens", "0", "--handoff", "sync")
    LOCAL = (*PAIR, "--local-prefill-tokens", "100000")

    @property
    def is_remote(self) -> bool:
        return self in (Way.LAYERWISE, Way.SYNC)


class Transcript(NamedTuple):
    """What one path answered, as token ids."""

    greedy: list[tuple[int, ...]]
    sampled: list[tuple[int, ...]]  # seed 7, two choices, for the first prompts


class Session:
    """One cluster under test."""

    def __init__(self, front: Front, way: Way, model: Path, served_name: str) -> None:
        self._front = front
        self._way = way
        self._name = served_name
        self._spelling = Spelling(load_tokenizer(model))

    def transcript(self, prompts: Sequence[Prompt], num_tokens: int, alone_step: int) -> Transcript:
        """All prompts 8 at once, and every alone_step-th alone.

        Some paths meet a cold prefix index alone, some in company.
        """
        alone = prompts[::alone_step]
        if self._way in (Way.MIXED, Way.LAYERWISE):
            together = self._ask_all(prompts, num_tokens, NUM_AT_ONCE)
            apart = self._ask_all(alone, num_tokens, 1)
        else:
            apart = self._ask_all(alone, num_tokens, 1)
            together = self._ask_all(prompts, num_tokens, NUM_AT_ONCE)
        for prompt, one, other in zip(alone, apart, together[::alone_step], strict=True):
            assert one == other, f"{self._way.name}, {prompt.name}: alone and in company differ"
        return Transcript(together, self._ask_sampled(prompts[:NUM_SAMPLED], num_tokens))

    def _ask_all(self, prompts: Sequence[Prompt], num_tokens: int, num_at_once: int) -> list[tuple[int, ...]]:
        before = self._front.readings()
        with ThreadPoolExecutor(num_at_once) as threads:
            answers = list(threads.map(lambda prompt: self._ask(prompt, num_tokens, temperature=0.0)[0], prompts))
        assert [len(answer) for answer in answers] == [num_tokens] * len(prompts)
        self._check_counters(before, len(prompts), sum(len(prompt.ids) for prompt in prompts))
        return answers

    def _ask_sampled(self, prompts: Sequence[Prompt], num_tokens: int) -> list[tuple[int, ...]]:
        """Chance is a pure function of seed, choice and position."""
        before = self._front.readings()
        asked = [(prompt, more) for prompt in prompts for more in ({"seed": 7, "n": 2}, {"seed": 7}, {"seed": 8})]
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            jobs = [threads.submit(self._ask, prompt, num_tokens, temperature=0.8, **more) for prompt, more in asked]
            answers = [job.result() for job in jobs]
        sampled: list[tuple[int, ...]] = []
        for number, prompt in enumerate(prompts):
            (first, second), (again,), (other,) = answers[3 * number : 3 * number + 3]
            assert first != second, f"{prompt.name}: two choices of one seed are equal"
            assert again == first, f"{prompt.name}: the same seed gives something else when asked again"
            assert other != first, f"{prompt.name}: another seed gives the same"
            sampled += [first, second]
        self._check_counters(before, 4 * len(prompts), 4 * sum(len(prompt.ids) for prompt in prompts))
        return sampled

    def _ask(self, prompt: Prompt, num_tokens: int, **more: float) -> list[tuple[int, ...]]:
        answers = self._front.complete(self._name, prompt.ids, num_tokens, **more)
        return [self._spelling.ids(answer.tokens) for answer in answers]

    def _check_counters(self, before: Readings, num_sequences: int, num_prompt_tokens: int) -> None:
        """The path was taken by every sequence, and no other; but second choices share the first one's prompt."""
        num_shared = self._front.readings().since(before).total(table.PLACEMENTS, reason="shared_prompt")
        num_read = num_sequences - num_shared
        writer = "mixed" if self._way is Way.MIXED else "decode"
        ended = {writer: num_sequences, **({"prefill": num_read} if self._way.is_remote else {})}
        seen = self._front.settled(ended, before)
        received, sent = (seen.total(table.HANDOFFS, outcome=outcome) for outcome in ("received", "sent"))
        computed = seen.total(table.PROMPT_TOKENS_COMPUTED, role=writer)
        cached = seen.total(table.PROMPT_TOKENS_CACHED, role=writer)
        assert seen.total(table.SEQUENCES, outcome="finished") == sum(ended.values())
        if self._way.is_remote:
            assert (received, sent) == (num_read, num_read)
            assert seen.total(table.PROMPT_TOKENS_RECEIVED) > 0
            # Of a shared prompt each reads the end, at most one block.
            assert computed <= 32 * num_shared, f"the decode worker computed {computed} prompt tokens itself"
            hidden = seen.total(table.HANDOFF_BYTES, visibility="hidden")
            assert hidden == 0 or self._way is Way.LAYERWISE, f"{hidden} bytes were sent before the prompt was computed"
        else:
            assert (received, sent, seen.total(table.PUSHES)) == (0, 0, 0)
            assert computed + cached == num_prompt_tokens
            assert seen.total(table.STEPS, role="prefill") == 0

    def check_layerwise_hides(self) -> None:
        """Over a whole run some bytes must have travelled while the prompt was still being computed."""
        assert self._front.readings().total(table.HANDOFF_BYTES, visibility="hidden") > 0


class Plan(NamedTuple):
    """What every path of one model is asked."""

    model: str  # as `disagg serve` takes it
    path: Path
    arguments: tuple[str, ...]
    prompts: list[Prompt]
    num_tokens: int = NUM_TOKENS
    alone_step: int = 1
    num_clusters_at_once: int = 1


def run_ways(plan: Plan) -> dict[Way, Transcript]:
    """A cluster per path."""
    with ThreadPoolExecutor(plan.num_clusters_at_once) as threads:
        return dict(zip(Way, threads.map(lambda way: run_way(way, plan), Way), strict=True))


def run_way(way: Way, plan: Plan) -> Transcript:
    with Serve((plan.model, *way.value, *plan.arguments)) as serve, Front(serve.url, timeout_s=300.0) as front:
        view = front.cluster()
        session = Session(front, way, plan.path, view.models[0].model)
        transcript = session.transcript(plan.prompts, plan.num_tokens, plan.alone_step)
        if way is Way.LAYERWISE and any(len(prompt.ids) > CHUNK for prompt in plan.prompts):
            session.check_layerwise_hides()
        front.wait_idle(len(view.workers))
        return transcript


def check_ways(transcripts: dict[Way, Transcript], prompts: Sequence[Prompt]) -> None:
    """In `exact` numerics paths do not differ in a single token."""
    expected = transcripts[Way.MIXED]
    for way, transcript in transcripts.items():
        for prompt, mine, theirs in zip(prompts, transcript.greedy, expected.greedy, strict=True):
            assert mine == theirs, f"{prompt.name}: {way.name} and {Way.MIXED.name} differ"
        assert transcript.sampled == expected.sampled, f"{way.name} and {Way.MIXED.name} sample differently"


def check_reference(path: Path, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> None:
    """Every token is the reference's choice, but for listed near ties."""
    reference = Reference(path)
    with_ties = []
    for prompt, answer in zip(prompts, answers, strict=True):
        differences = reference.differences(prompt.ids, answer)
        print(f"{prompt.name}: {len(answer)} tokens, differences {differences}")
        assert all(difference.is_near_tie for difference in differences), f"{prompt.name}: {differences}"
        if differences:
            with_ties.append((prompt.name, differences))
    print(f"{len(prompts)} prompts, near ties in {len(with_ties)}: {with_ties}")
    assert len(with_ties) <= NUM_NEAR_TIES_ALLOWED, with_ties


def check(plan: Plan) -> None:
    transcripts = run_ways(plan)
    check_ways(transcripts, plan.prompts)
    check_reference(plan.path, plan.prompts, transcripts[Way.MIXED].greedy)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ["tiny_llama", pytest.param("tiny_qwen2", marks=pytest.mark.slow)])
def test_tiny_models_answer_alike_on_every_path(architecture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(architecture)
    prompts = make_prompts(path, (*BORDERS, *CHUNK_BORDERS, 600, 630))
    arguments = ("--kv-memory", "16M", "--num-threads", "1", "--beat-interval-s", "2.5", "--min-push-bytes", "4K")
    check(Plan(str(path), path, arguments, prompts, alone_step=3, num_clusters_at_once=2))


def test_the_checks_can_fail(tiny_llama: Path) -> None:
    """One wrong token in one answer of one path is found, between paths and by the reference."""
    prompts = make_prompts(tiny_llama, (16, 17))[:1]
    answer = tuple(range(3, 3 + NUM_TOKENS))
    with pytest.raises(AssertionError, match="16 tokens"):
        check_reference(tiny_llama, prompts, [answer])
    transcripts = {way: Transcript([answer], [answer]) for way in Way}
    check_ways(transcripts, prompts)
    with pytest.raises(AssertionError, match="16 tokens: SYNC and MIXED differ"):
        check_ways({**transcripts, Way.SYNC: Transcript([(4, *answer[1:])], [answer])}, prompts)
    with pytest.raises(AssertionError, match="LOCAL and MIXED sample differently"):
        check_ways({**transcripts, Way.LOCAL: Transcript([answer], [(4, *answer[1:])])}, prompts)


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_the_real_model_answers_short_prompts_alike_on_every_path(smollm2_path: Path) -> None:
    prompts = make_prompts(smollm2_path, (1, 16, 17))[:5]
    arguments = ("--kv-memory", "64M", "--beat-interval-s", "2.5")
    check(Plan("smollm2", smollm2_path, arguments, prompts, num_tokens=8, alone_step=5, num_clusters_at_once=2))


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_model_answers_alike_on_every_path(smollm2_path: Path) -> None:
    prompts = make_prompts(smollm2_path, (*BORDERS, *CHUNK_BORDERS, *LONG))
    assert len(prompts) == 24
    arguments = ("--kv-memory", "768M", "--beat-interval-s", "2.5")
    check(Plan("smollm2", smollm2_path, arguments, prompts, alone_step=3))
