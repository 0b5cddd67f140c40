"""Timelines of a whole cluster in virtual time: 1,000 requests on all paths, some retried, some aborted.

Every message takes the same time. So what must be left for the network is known, and a stage that is lost, counted
twice or measured over the wrong stretch shows: there is then too much or too little left.
"""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from tests.property.test_virtual_cluster import draw_request, kill_and_restart

from disagg.core.ids import RequestId
from disagg.core.roles import HandoffMode, Role
from disagg.dispatch.actions import Deliver
from disagg.dispatch.stream import TokensDelivered
from disagg.telemetry.stages import Stage, StageClock, StageTime
from disagg.telemetry.timeline import ChoiceTimeline, Part, lay_out
from disagg.telemetry.track import Head, RequestTrack
from disagg.testing.virtual import VirtualCluster
from disagg.testing.virtual_time import Chances, Timing

MESSAGE_S = 0.003
TIMING = Timing(message_s=MESSAGE_S, jitter=1.0)
NUM_SEEDS, NUM_REQUESTS = 10, 100
NETWORK = (Stage.NETWORK_PREFILL, Stage.NETWORK_DECODE)


class Seen:
    """What the client of one request saw, and its track."""

    def __init__(self, track: RequestTrack, submitted_s: float) -> None:
        self.track = track
        self.submitted_s = submitted_s
        self.token_s: list[list[float]] = [[] for _ in track.choices]
        self.aborted_s: float | None = None


class WatchedCluster(VirtualCluster):
    """Notes when each client gets each token, by itself."""

    def __init__(self, seed: int, chances: Chances, local_prefill_tokens: int) -> None:
        super().__init__(seed, local_prefill_tokens=local_prefill_tokens, timing=TIMING, chances=chances)
        self.seen: dict[RequestId, Seen] = {}

    def ask(self, rng: random.Random, *, may_abort: bool = True) -> None:
        request = draw_request(rng)
        track = RequestTrack(Head(received_s=self.time.now_s), request.num_choices)
        request_id = self.submit(request, track)
        self.seen[request_id] = Seen(track, self.time.now_s)
        if may_abort and rng.random() < 0.2:
            self.time.after(rng.uniform(0, 0.6), partial(self._leave, request_id))

    def _leave(self, request_id: RequestId) -> None:
        if not self.answers[request_id].is_over:
            self.seen[request_id].aborted_s = self.time.now_s
            self.abort(request_id)

    def _to_client(self, action: Deliver) -> None:
        super()._to_client(action)
        if isinstance(action.event, TokensDelivered):
            times = self.seen[action.request_id].token_s[action.event.choice]
            times += [self.time.now_s] * len(action.event.tokens)


def messages(timeline: ChoiceTimeline, part: Part) -> float:
    """How many messages' time the network has of a part."""
    return sum(timeline.seconds(part, stage) for stage in NETWORK) / MESSAGE_S


def check(seen: Seen) -> list[str]:
    """Fails unless each choice's stages are what its client saw; what kinds of choices they were."""
    kinds = []
    for choice, token_s in zip(lay_out(seen.track).choices, seen.token_s, strict=True):
        choice.check_invariants()
        assert choice.overlap_s < 1e-9, choice
        assert choice.seconds(Part.TTFT, Stage.UNREPORTED) == choice.seconds(Part.FIRST_GAP, Stage.UNREPORTED) == 0
        end_s = seen.aborted_s if choice.outcome == "aborted" else token_s[-1]
        assert end_s is not None
        assert choice.total_s == pytest.approx(end_s - seen.submitted_s, abs=1e-9)
        assert (choice.ttft_s, choice.first_gap_s) == (
            pytest.approx(token_s[0] - seen.submitted_s, abs=1e-9) if token_s else None,
            pytest.approx(token_s[1] - token_s[0], abs=1e-9) if token_s[1:] else None,
        )
        if token_s:
            check_network(choice, Part.TTFT)
        if token_s[1:]:
            check_network(choice, Part.FIRST_GAP)
        kinds += [choice.outcome, choice.path, *(["moved"] if choice.num_attempts > 1 else [])]
        if choice.num_attempts == 1 and token_s:
            assert choice.seconds(Part.TTFT, Stage.LOST) == choice.seconds(Part.FIRST_GAP, Stage.LOST) == 0
    return kinds


def check_all(cluster: WatchedCluster) -> Counter[str]:
    return Counter(kind for seen in cluster.seen.values() for kind in check(seen))


def check_network(choice: ChoiceTimeline, part: Part) -> None:
    """There and back; or there, to the other worker and back, where the decode worker's word came first.

    From one token to the next of the same worker the messages cancel out; from another's one is left.
    """
    left = messages(choice, part)
    if choice.num_attempts > 1 and part is Part.FIRST_GAP:  # the first token may come when the next attempt has begun
        assert -1e-6 < left < 3 + 1e-6, choice
        return
    likely = {Part.TTFT: (2, 3), Part.FIRST_GAP: (0, 1)}[part]
    assert min(abs(left - count) for count in likely) < 1e-6, (left, choice)


def has_mixed(seed: int) -> bool:
    return seed % 3 == 0


def start(cluster: WatchedCluster, seed: int) -> None:
    """Both modes, small pools that streams outgrow, unlike blocks."""
    mode = list(HandoffMode)[seed % 2]
    for index in range(2):
        cluster.start_worker(f"prefill-{index}", Role.PREFILL, mode=mode, num_blocks=30, block_size=4 + 4 * index)
        cluster.start_worker(f"decode-{index}", Role.DECODE, num_blocks=[30, 64][index])
    if has_mixed(seed):
        cluster.start_worker("mixed-0", Role.MIXED)
    cluster.time.run(until=lambda: cluster.is_ready)


def run(seed: int, num_requests: int, *, with_faults: bool) -> WatchedCluster:
    rng = random.Random(seed)
    chances = Chances(corrupt=0.03, step_failure=0.01) if with_faults else Chances()
    cluster = WatchedCluster(seed, chances, local_prefill_tokens=25)
    start(cluster, seed)
    for _ in range(num_requests):
        cluster.time.after(rng.uniform(0, num_requests / 10), partial(cluster.ask, rng, may_abort=with_faults))
    for _ in range(num_requests // 25 if with_faults else 0):
        cluster.time.after(rng.uniform(0, num_requests / 10), partial(kill_and_restart, cluster, rng))
    cluster.time.run(until=lambda: len(cluster.seen) == num_requests and cluster.are_all_over)
    return cluster


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_stages_are_what_the_client_saw(seed: int) -> None:
    cluster = run(seed, NUM_REQUESTS, with_faults=True)
    kinds = check_all(cluster)
    assert min(kinds[kind] for kind in ("finished", "aborted", "moved", "local", "remote")) >= 3, kinds
    assert (kinds["mixed"] > 0) == has_mixed(seed), kinds
    cluster.check_nothing_left()


def without(stage: Stage) -> Callable[[tuple[StageTime, ...]], tuple[StageTime, ...]]:
    return lambda spent: tuple(each for each in spent if each.stage is not stage)


def twice(stage: Stage) -> Callable[[tuple[StageTime, ...]], tuple[StageTime, ...]]:
    return lambda spent: spent + tuple(each for each in spent if each.stage is stage)


REPORTED = (Stage.RESERVATION, Stage.PREFILL, Stage.TRANSFER, Stage.FIRST_STEP)


@pytest.mark.parametrize("stage", REPORTED)
@pytest.mark.parametrize("spoil", [without, twice])
def test_a_stage_that_is_lost_or_counted_twice_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
    stage: Stage,
    spoil: Callable[[Stage], Callable[[tuple[StageTime, ...]], tuple[StageTime, ...]]],
) -> None:
    take, spoiled = StageClock.take, spoil(stage)
    monkeypatch.setattr(StageClock, "take", lambda clock, now_s: spoiled(take(clock, now_s)))
    cluster = run(1, 20, with_faults=False)
    with pytest.raises(AssertionError):
        check_all(cluster)
