"""Router, prefill and decode worker started in every order: /ready is truthful at each stage, nothing is stranded."""

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
from tests.e2e.cluster import FAST_BEATS, START_TIMEOUT_S, Front, completion, reserved_ports, router, worker

from disagg.core.errors import InternalFault
from disagg.telemetry import metrics as table
from disagg.testing.processes import wait_until

MODEL = "tiny-llama"
PARTS = ("router", "prefill", "decode")
ORDERS = tuple(itertools.permutations(PARTS))
MAX_DELAY_S = 2.0
NUM_AT_ONCE = 3

# What /ready may name as missing, by the workers that must have been started for it to be true.
NOBODY = "no worker has registered"
PREFILL_ONLY = "a prefill worker is here, no decode worker has registered"
DECODE_ONLY = "a decode worker is here, no prefill worker has registered"
NOT_PAIRED = "prefill and decode workers are here, but no two of them have paired"
NEEDS = {
    NOBODY: frozenset[str](),
    PREFILL_ONLY: frozenset({"prefill"}),
    DECODE_ONLY: frozenset({"decode"}),
    NOT_PAIRED: frozenset({"prefill", "decode"}),
    "": frozenset({"prefill", "decode"}),
}
# Here each part is started when /ready has told of the one before: no stage is missed, however busy the machine is.
STEPWISE = ORDERS[0]
SHOWN = {"router": NOBODY, "prefill": PREFILL_ONLY}


class Watch:
    """Looks at /ready and checks each answer against what has been started so far."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.started: set[str] = set()
        self.seen: list[str] = []  # what was missing, in order; "" when ready

    def look(self) -> bool:
        """Whether it is ready."""
        try:
            response = self._front.health()
        except httpx.ConnectError:
            assert not self.seen, "the router answered before and does not any more"
            return False
        assert "router" in self.started
        body = response.json()
        missing = body["models"][0]["missing"]
        assert missing in NEEDS, body
        assert NEEDS[missing] <= self.started, f"{missing!r} is said, but only {sorted(self.started)} were started"
        if missing:
            assert response.status_code == httpx.codes.SERVICE_UNAVAILABLE
            assert missing in body["error"]["message"]
            assert int(response.headers["Retry-After"]) >= 1
            assert "" not in self.seen, f"it was ready and is not any more: {missing}"
        else:
            assert response.status_code == httpx.codes.OK
        self.seen.append(missing)
        return not missing

    def has_seen(self, missing: str) -> bool:
        """After one more look."""
        self.look()
        return missing in self.seen

    def look_for(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        pause = threading.Event()
        while time.monotonic() < until_s:
            self.look()
            pause.wait(0.02)

    def refused_request(self) -> None:
        """A request that is not ready to be served is told so, and when to come again."""
        response = self._front.post(completion(MODEL, [5, 6, 7], 3))
        if response.status_code == httpx.codes.OK:  # it became ready in between
            assert self.look()
            return
        assert response.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert int(response.headers["Retry-After"]) >= 1
        assert response.json()["error"]["code"] == "service_unavailable"


def start_in_order(order: tuple[str, ...], model: Path) -> list[str]:
    """One whole life of one cluster; what /ready said."""
    chance = random.Random("-".join(order))
    make: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        port, control_port = stack.enter_context(reserved_ports(2))
        control = f"127.0.0.1:{control_port}"
        front = stack.enter_context(Front(f"http://127.0.0.1:{port}"))
        watch = Watch(front)

        def start_router() -> None:
            stack.enter_context(router({MODEL: model}, *FAST_BEATS, port=port, control_port=control_port))

        def start_worker(role: str) -> None:
            more = ("--served-name", MODEL, *FAST_BEATS)
            stack.enter_context(worker(model, role, f"{role}-0", control, *more))

        make["router"] = start_router
        make["prefill"] = lambda: start_worker("prefill")
        make["decode"] = lambda: start_worker("decode")
        for part in order:
            watch.started.add(part)
            make[part]()
            watch.look_for(chance.uniform(0.0, MAX_DELAY_S))
            if order == STEPWISE and part in SHOWN:
                wait_until(partial(watch.has_seen, SHOWN[part]), START_TIMEOUT_S, f"/ready to say {SHOWN[part]!r}")
        wait_until(lambda: watch.look() or bool(watch.seen), START_TIMEOUT_S, "the router to answer")
        watch.refused_request()
        wait_until(watch.look, START_TIMEOUT_S, f"the pair to be usable; {watch.seen[-1:]}")
        # Usable means usable: the first request is served, by a hand-off, whatever came first.
        before = front.readings()
        prompt = [3 + index % 300 for index in range(600)]
        (answer,) = front.complete(MODEL, prompt, 4)
        assert len(answer.tokens) == 4
        seen = front.settled({"decode": 1, "prefill": 1}, before)
        assert seen.total(table.HANDOFFS, outcome="received") == 1
        assert watch.look()
        front.wait_idle(2)
        return watch.seen


# The router first, part by part; and last.
SOME = (STEPWISE, ORDERS[3])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("orders", [SOME, pytest.param(ORDERS, marks=pytest.mark.slow)], ids=["some", "every"])
def test_orders_of_starting_work_and_health_is_truthful(tiny_llama: Path, orders: tuple[tuple[str, ...], ...]) -> None:
    def run(order: tuple[str, ...]) -> list[str]:
        try:
            return start_in_order(order, tiny_llama)
        except BaseException as error:
            error.add_note(f"started in the order {order}")
            raise

    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        stories = list(threads.map(run, orders))
    for order, story in zip(orders, stories, strict=True):
        steps = [missing for missing, _ in itertools.groupby(story)]
        print(order, steps)
        # Stages may be missed between two looks, but none comes twice.
        assert len(set(steps)) == len(steps), f"{order}: {steps}"
    # Waiting was seen in more than one kind, or the watch saw too little to prove anything.
    said = {missing for story in stories for missing in story}
    assert {NOBODY, ""} <= said, said
    assert said & {PREFILL_ONLY, DECODE_ONLY}, said


def test_the_watch_can_fail() -> None:
    """A front that claims too much is found out."""

    class Liar(Front):
        def health(self) -> httpx.Response:
            return httpx.Response(503, json={"models": [{"missing": PREFILL_ONLY}]})

    with Liar("http://127.0.0.1:1") as front:
        watch = Watch(front)
        watch.started.add("router")
        with pytest.raises(AssertionError, match=r"only \['router'\] were started"):
            watch.look()
        with pytest.raises(InternalFault, match="connection"):
            wait_until(lambda: False, 0.05, "a connection")
