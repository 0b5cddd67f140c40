"""Who serves a sequence, on which path, and what is said when nobody can."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.core.ids import WorkerId
from disagg.core.roles import Role
from disagg.policy.routing import (
    Demand,
    NoPlacement,
    Path,
    Placement,
    PlacementReason,
    WorkerView,
    can_follow,
    choose,
    num_shared_tokens,
    what_is_missing,
)

BLOCK = 16


def view(
    name: str,
    role: Role,
    *,
    partners: Iterable[str] = (),
    num_blocks: int = 1000,
    claimed: int = 0,
    waiting: int = 0,
    num_open: int = 0,
) -> WorkerView:
    return WorkerView(
        worker_id=WorkerId(name),
        role=role,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_claimed_blocks=claimed,
        num_waiting_tokens=waiting,
        num_open=num_open,
        partners=frozenset(map(WorkerId, partners)),
    )


PAIR = [view("p", Role.PREFILL, partners=["d"]), view("d", Role.DECODE)]


def demand(
    num_prompt: int,
    num_answer: int = 1,
    num_cached: int = 0,
    *,
    decode: str | None = None,
    prefill: str | None = None,
    excluded: Iterable[str] = (),
) -> Demand:
    return Demand(
        num_prompt_tokens=num_prompt,
        num_uncached_tokens=num_prompt - num_cached,
        num_total_tokens=num_prompt + num_answer - 1,
        preferred_decode=WorkerId(decode) if decode is not None else None,
        preferred_prefill=WorkerId(prefill) if prefill is not None else None,
        excluded=frozenset(map(WorkerId, excluded)),
    )


def placed(workers: list[WorkerView], what: Demand, limit: int = 0) -> Placement:
    placement = choose(workers, what, limit)
    assert isinstance(placement, Placement)
    return placement


@pytest.mark.parametrize("limit", [0, 1, BLOCK - 1, BLOCK, 10**9])
@pytest.mark.parametrize("num_prompt", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5000])
def test_a_prompt_up_to_the_limit_is_read_by_the_decode_worker(limit: int, num_prompt: int) -> None:
    placement = choose(PAIR, demand(num_prompt), limit)
    if num_prompt <= limit:
        assert placement == Placement(Path.LOCAL, PlacementReason.SHORT_PROMPT, WorkerId("d"))
    else:
        assert placement == Placement(Path.REMOTE, PlacementReason.LONG_PROMPT, WorkerId("d"), WorkerId("p"))


@pytest.mark.parametrize(
    ("decode", "num_cached", "path"),
    [("d", 490, Path.LOCAL), ("d", 489, Path.REMOTE), (None, 490, Path.REMOTE), ("gone", 490, Path.REMOTE)],
)
def test_only_uncached_tokens_count_against_the_limit_where_they_are_cached(
    decode: str | None, num_cached: int, path: Path
) -> None:
    placement = placed(PAIR, demand(500, num_cached=num_cached, decode=decode), 10)
    assert (placement.decode, placement.path) == ("d", path)


def test_a_mixed_worker_does_both_whatever_the_limit() -> None:
    for limit in (0, 10**9):
        placement = choose([view("m", Role.MIXED)], demand(500), limit)
        assert placement == Placement(Path.MIXED, PlacementReason.MIXED_WORKER, WorkerId("m"))


def test_the_least_claimed_share_of_a_pool_wins() -> None:
    """Claims are weighed against the size of the pool, not counted."""
    workers = [
        view("p", Role.PREFILL, partners=["big", "small"]),
        view("big", Role.DECODE, num_blocks=1000, claimed=300),
        view("small", Role.DECODE, num_blocks=100, claimed=40),
    ]
    placement = choose(workers, demand(50), 0)
    assert isinstance(placement, Placement)
    assert placement.decode == "big"


def test_a_worker_that_can_hold_the_whole_answer_is_preferred_to_an_idle_one() -> None:
    workers = [
        view("p", Role.PREFILL, partners=["big", "small"]),
        view("big", Role.DECODE, num_blocks=100, claimed=90),
        view("small", Role.DECODE, num_blocks=10),
    ]
    for num_answer, expected in ((1, "small"), (10 * BLOCK, "small"), (10 * BLOCK + 1, "big")):
        placement = choose(workers, Demand(1, 1, num_answer), 0)
        assert isinstance(placement, Placement)
        assert placement.decode == expected


def test_only_prefill_workers_paired_with_the_chosen_decode_worker_are_asked() -> None:
    workers = [
        view("p0", Role.PREFILL, partners=["d0"]),
        view("p1", Role.PREFILL, partners=["d1"], waiting=9999),
        view("d0", Role.DECODE, claimed=500),
        view("d1", Role.DECODE),
    ]
    placement = choose(workers, demand(50), 0)
    assert placement == Placement(Path.REMOTE, PlacementReason.LONG_PROMPT, WorkerId("d1"), WorkerId("p1"))


def test_a_decode_worker_without_partner_is_not_used() -> None:
    workers = [*PAIR, view("lonely", Role.DECODE)]
    for _ in range(2):
        placement = choose(workers, demand(50), 10**9)
        assert isinstance(placement, Placement)
        assert placement.decode == "d"


def test_a_prompt_no_prefill_pool_can_hold_falls_back_and_says_so() -> None:
    workers = [view("p", Role.PREFILL, partners=["d"], num_blocks=10), view("d", Role.DECODE)]
    for num_prompt, reason in ((160, PlacementReason.LONG_PROMPT), (161, PlacementReason.PREFILL_POOL_TOO_SMALL)):
        placement = choose(workers, demand(num_prompt), 0)
        assert isinstance(placement, Placement)
        assert placement.reason is reason


def test_long_prompts_spread_evenly_over_prefill_workers() -> None:
    """32k tokens in, 1 out: outstanding prompt tokens decide, although lengths differ by a factor of 64."""
    names = [f"p{number}" for number in range(4)]
    waiting = dict.fromkeys(names, 0)
    total = dict.fromkeys(names, 0)
    for number in range(400):
        length = 512 if number % 2 else 32768 - 13 * number
        workers = [view(name, Role.PREFILL, partners=["d"], waiting=waiting[name], num_blocks=4096) for name in names]
        placement = choose([*workers, view("d", Role.DECODE, num_blocks=10**6)], demand(length), 0)
        assert isinstance(placement, Placement)
        assert placement.prefill is not None
        waiting[placement.prefill] += length
        total[placement.prefill] += length
        if number % 3 == 0:  # all four read on, at one speed
            waiting = {name: max(0, tokens - 8192) for name, tokens in waiting.items()}
    mean = sum(total.values()) / 4
    assert all(abs(tokens - mean) < 0.1 * mean for tokens in total.values()), total


def test_outstanding_tokens_count_before_outstanding_prompts() -> None:
    workers = [
        view("one-long", Role.PREFILL, partners=["d"], waiting=5000, num_open=1),
        view("many-short", Role.PREFILL, partners=["d"], waiting=400, num_open=9),
        view("d", Role.DECODE),
    ]
    placement = choose(workers, demand(50), 0)
    assert isinstance(placement, Placement)
    assert placement.prefill == "many-short"


def test_answers_spread_evenly_over_decode_workers() -> None:
    claims = dict.fromkeys(["d0", "d1", "d2"], 0)
    for number in range(300):
        length = 30 + (number * 37) % 200
        workers = [view("p", Role.PREFILL, partners=claims)]
        workers += [view(name, Role.DECODE, claimed=blocks, num_blocks=10**5) for name, blocks in claims.items()]
        placement = choose(workers, demand(length), 0)
        assert isinstance(placement, Placement)
        claims[placement.decode] += length // BLOCK + 1
    mean = sum(claims.values()) / 3
    assert all(abs(blocks - mean) < 0.1 * mean for blocks in claims.values()), claims


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ([], "no worker has registered"),
        ([view("d", Role.DECODE)], "a decode worker is here, no prefill worker has registered"),
        ([view("p", Role.PREFILL, partners=["d"])], "a prefill worker is here, no decode worker has registered"),
        (
            [view("p", Role.PREFILL), view("d", Role.DECODE, partners=["p"])],
            "prefill and decode workers are here, but no two of them have paired",
        ),
        (PAIR, ""),
        ([view("m", Role.MIXED)], ""),
    ],
)
def test_a_sentence_says_what_is_missing(workers: list[WorkerView], missing: str) -> None:
    assert what_is_missing(workers) == missing
    placement = choose(workers, demand(50), 0)
    has_writer = any(view.role is not Role.PREFILL for view in workers)
    if not has_writer:
        assert placement == NoPlacement(missing)
    elif missing:  # not as intended, but better than nothing
        assert placement == Placement(Path.LOCAL, PlacementReason.NO_PREFILL_WORKER, WorkerId("d"))
    else:
        assert isinstance(placement, Placement)
        assert placement.path is not Path.LOCAL


def test_a_partner_of_the_same_role_makes_no_pair() -> None:
    workers = [view("p0", Role.PREFILL, partners=["p1", "gone"]), view("p1", Role.PREFILL)]
    assert what_is_missing(workers) == "a prefill worker is here, no decode worker has registered"


# --- once more, after a failure ----------------------------------------------------------------------------------

SITE = [
    view("p0", Role.PREFILL, partners=["d0", "d1"]),
    view("p1", Role.PREFILL, partners=["d0", "d1"], waiting=900),
    view("d0", Role.DECODE),
    view("d1", Role.DECODE, claimed=900),
]


@pytest.mark.parametrize(
    ("what", "decode", "prefill"),
    [
        (demand(50), "d0", "p0"),
        (demand(50, decode="d1"), "d1", "p0"),
        (demand(50, prefill="p1"), "d0", "p1"),
        (demand(50, decode="gone", prefill="gone"), "d0", "p0"),
        (demand(50, excluded=["d0"]), "d1", "p0"),
        (demand(50, excluded=["p0"]), "d0", "p1"),
        (demand(50, excluded=["d0", "d1"]), "d0", "p0"),  # nobody else is there
        (demand(50, decode="d1", excluded=["d1"]), "d0", "p0"),
        (demand(50, prefill="p1", excluded=["p1"]), "d0", "p0"),
    ],
)
def test_preferences_come_before_load_and_exclusions_before_preferences(
    what: Demand, decode: str, prefill: str
) -> None:
    placement = placed(SITE, what)
    assert placement == Placement(Path.REMOTE, PlacementReason.LONG_PROMPT, WorkerId(decode), WorkerId(prefill))


def test_when_all_prefill_workers_have_failed_it_the_decode_worker_reads_it() -> None:
    placement = placed(SITE, demand(50, excluded=["p0", "p1"]))
    assert placement == Placement(Path.LOCAL, PlacementReason.NO_PREFILL_WORKER, WorkerId("d0"))


def test_a_preferred_worker_that_can_never_hold_it_is_not_taken() -> None:
    workers = [*PAIR, view("small", Role.DECODE, num_blocks=3)]
    workers[0] = view("p", Role.PREFILL, partners=["d", "small"])
    assert placed(workers, demand(48, decode="small")).decode == "small"
    assert placed(workers, demand(49, decode="small")).decode == "d"


def test_a_mixed_worker_is_preferred_and_excluded_too() -> None:
    workers = [view("m0", Role.MIXED), view("m1", Role.MIXED, claimed=10)]
    assert placed(workers, demand(50, decode="m1")).decode == "m1"
    assert placed(workers, demand(50, excluded=["m0"])).decode == "m1"
    assert placed(workers, demand(50, excluded=["m0", "m1"])).decode == "m0"


def test_a_decode_worker_without_partner_is_taken_only_when_no_other_is_there() -> None:
    workers = [*PAIR, view("lonely", Role.DECODE)]
    assert placed(workers, demand(50, excluded=["d"])).decode == "lonely"
    assert placed(workers, demand(50, decode="lonely")).decode == "d"


@pytest.mark.parametrize(
    ("num_prompt", "expected"), [(1, 0), (BLOCK, 0), (BLOCK + 1, BLOCK), (2 * BLOCK, BLOCK), (2 * BLOCK + 1, 2 * BLOCK)]
)
def test_choices_share_whole_blocks_and_compute_the_last_token_each(num_prompt: int, expected: int) -> None:
    assert num_shared_tokens(num_prompt, BLOCK) == expected


@pytest.mark.parametrize(
    ("num_prompt", "claimed", "alone", "expected"),
    [
        (100, 0, "e", True),
        (BLOCK, 0, "d", False),  # nothing to share
        (100, 93, "e", True),  # 7 blocks are left, as many as it takes
        (100, 94, "e", False),
        (100, 94, "d", True),  # it would go there anyway
    ],
)
def test_a_choice_follows_another_where_something_is_shared_and_there_is_room(
    num_prompt: int, claimed: int, alone: str, expected: bool
) -> None:
    writer = view("d", Role.DECODE, num_blocks=100, claimed=claimed)
    placement = Placement(Path.LOCAL, PlacementReason.SHORT_PROMPT, WorkerId(alone))
    assert can_follow(writer, demand(num_prompt), placement) is expected


def plainly_chosen(workers: list[WorkerView], wanted: Demand, local_prefill_tokens: int) -> Placement | NoPlacement:
    """The rule as it reads, every worker looked at for every part of it."""

    def decode_rank(each: WorkerView) -> tuple[bool, float, int, str]:
        share = each.num_claimed_blocks / each.num_blocks
        return each.worker_id != wanted.preferred_decode, share, each.num_open, each.worker_id

    def prefill_rank(each: WorkerView) -> tuple[bool, int, int, str]:
        return each.worker_id != wanted.preferred_prefill, each.num_waiting_tokens, each.num_open, each.worker_id

    writers = [each for each in workers if each.role is not Role.PREFILL]
    writers = [each for each in writers if each.worker_id not in wanted.excluded] or writers
    if not writers:
        return NoPlacement(what_is_missing(workers))
    sources = [each for each in workers if each.role is Role.PREFILL and each.worker_id not in wanted.excluded]
    reachable = {name for each in sources for name in each.partners}
    whole = [each for each in writers if each.role is Role.MIXED or each.worker_id in reachable] or writers
    decode = min([each for each in whole if each.can_hold(wanted.num_total_tokens)] or whole, key=decode_rank)
    if decode.role is Role.MIXED:
        return Placement(Path.MIXED, PlacementReason.MIXED_WORKER, decode.worker_id)
    is_preferred = decode.worker_id == wanted.preferred_decode
    if (wanted.num_uncached_tokens if is_preferred else wanted.num_prompt_tokens) <= local_prefill_tokens:
        return Placement(Path.LOCAL, PlacementReason.SHORT_PROMPT, decode.worker_id)
    partners = [each for each in sources if decode.worker_id in each.partners]
    able = [each for each in partners if each.can_hold(wanted.num_prompt_tokens)]
    if not able:
        reason = PlacementReason.PREFILL_POOL_TOO_SMALL if partners else PlacementReason.NO_PREFILL_WORKER
        return Placement(Path.LOCAL, reason, decode.worker_id)
    prefill = min(able, key=prefill_rank)
    return Placement(Path.REMOTE, PlacementReason.LONG_PROMPT, decode.worker_id, prefill.worker_id)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_the_choice_is_that_of_the_plain_rule(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"w{index}" for index in range(rng.randint(0, 6))]

    def some(share: float) -> list[str]:
        return [name for name in names if rng.random() < share]

    workers = [
        view(
            name,
            rng.choice([Role.PREFILL, Role.DECODE, Role.DECODE, Role.MIXED] if rng.random() < 0.2 else [*Role][:2]),
            partners=some(0.6),
            num_blocks=rng.choice([4, 50, 1000]),
            claimed=rng.randint(0, 3),
            waiting=rng.randint(0, 2),
            num_open=rng.randint(0, 2),
        )
        for name in names
    ]
    known = [*names, "gone", None]
    wanted = demand(
        rng.choice([10, 100, 900]),
        rng.choice([1, 500]),
        rng.choice([0, 8]),
        decode=rng.choice(known),
        prefill=rng.choice(known),
        excluded=some(0.2),
    )
    local = rng.choice([0, 50])
    assert choose(workers, wanted, local) == plainly_chosen(workers, wanted, local)
