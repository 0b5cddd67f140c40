"""Signals that strike the worker at work in the middle of an answer: for certain, however fast it is written.

A worker says how it stands four times a second, and an answer of hundreds of tokens may be over between two such words.
So when the moment has come all workers of one role are stopped. They go on for an instant at a time until one of them
has said that it is at work; that one is struck, the others go on. An answer that has ended all the same (of a client
that was starved) proves nothing: it is asked for again, a bounded number of times.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from tests.e2e.cluster import Front, go_on, stop

from disagg.cluster.view import WorkerStateView
from disagg.core.errors import InternalFault
from disagg.telemetry import metrics as table
from disagg.testing.processes import Serve, wait_until

INSTANT_S = 0.005  # a few steps
REPORT_S = 0.3  # after so long each worker has something to say as soon as it goes on
TIMEOUT_S = 60.0
MAX_TRIES = 5

Act = Callable[[], None]
A = TypeVar("A")


class Moment(NamedTuple):
    """Who is to be struck, and when."""

    role: str
    has_come: Callable[[WorkerStateView], bool]  # by what a worker says of itself


WRITING = Moment("decode", lambda state: state.num_decoding > 0)


def reading(num_tokens: int, share: float = 0.0) -> Moment:
    """In the middle of a prompt of so many tokens, once at least this share of it is computed."""
    most_left = round(num_tokens * (1 - share))
    return Moment("prefill", lambda state: state.num_running > 0 and 0 < state.num_waiting_tokens <= most_left)


class Aim:
    """At the one of these processes that is at work for the only open request.

    To be made before that request, while nothing runs: finding processes takes longer than an answer may, and what
    workers have said of earlier requests must have been taken back.
    """

    def __init__(self, pids: Mapping[str, int], url: str, moment: Moment) -> None:
        """pids: of all workers of the moment's role, by name. url: the router's."""
        self.struck: str | None = None  # its name; None when nobody was
        self._pids = dict(pids)
        self._url = url
        self._moment = moment

    def hold(self) -> str | None:
        """Stop them all in the moment; the name of the one at work, or None when the answer is over by then."""
        stop(*self._pids.values())
        try:
            with Front(self._url) as front:
                return self._find(front)
        except BaseException:
            self.let_go()
            raise

    def let_go(self) -> None:
        """All of them go on."""
        go_on(*self._pids.values())

    def strike(self, number: int) -> None:
        """Send a signal to whoever is at work. Who is sent SIGSTOP stands still until let_go()."""
        self.struck = self.hold()
        going_on = dict(self._pids)
        if self.struck is not None:
            os.kill(going_on[self.struck], number)
            if number == signal.SIGSTOP:
                del going_on[self.struck]
        go_on(*going_on.values())

    def _find(self, front: Front) -> str | None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            view = front.cluster()
            for worker in view.workers:
                if worker.worker_id in self._pids and self._moment.has_come(worker.state):
                    return worker.worker_id
            if not view.router.num_open_requests:
                return None
            go_on(*self._pids.values())
            time.sleep(INSTANT_S)
            stop(*self._pids.values())
            time.sleep(REPORT_S)  # what was said has arrived, and the next word is due
        raise InternalFault(f"within {TIMEOUT_S:g} s no {self._moment.role} worker was at work on an open request")


def num_open(front: Front) -> int:
    return front.cluster().router.num_open_requests


def aim_at(serve: Serve, front: Front, moment: Moment) -> Aim:
    names = [worker.worker_id for worker in front.cluster().workers if worker.role == moment.role]
    return Aim({name: serve.pid_of(name) for name in names}, front.url, moment)


def strike_until_moved(
    serve: Serve, front: Front, moment: Moment, number: int, ask: Callable[[Act], A]
) -> tuple[str, list[A]]:
    """Ask until a worker was struck with the signal in the middle of it and the sequence went elsewhere.

    `ask` asks a question and calls its argument when it is time to strike. Returns the name of the last one struck, and
    all answers. A worker that was sent SIGSTOP goes on once the sequence is elsewhere: who hangs for long is killed.
    """
    num_workers = len(front.cluster().workers)
    answers: list[A] = []
    for _ in range(MAX_TRIES):
        serve.wait_healthy()
        front.wait_idle(num_workers, timeout_s=TIMEOUT_S)
        moves = front.readings().total(table.MOVES)
        aim = aim_at(serve, front, moment)

        def has_moved(moves: int = moves) -> bool:
            return front.readings().total(table.MOVES) > moves

        def act(aim: Aim = aim, has_moved: Callable[[], bool] = has_moved) -> None:
            aim.strike(number)
            if number == signal.SIGSTOP and aim.struck is not None:
                wait_until(lambda: has_moved() or num_open(front) == 0, TIMEOUT_S, f"{aim.struck} to be given up")
                aim.let_go()

        try:
            answers.append(ask(act))
        finally:
            aim.let_go()
        if aim.struck is not None and has_moved():
            return aim.struck, answers
    raise InternalFault(f"{MAX_TRIES} answers were over before a {moment.role} worker was struck")


def act_once_open(front: Front, ask: Callable[[Front], A], act: Act) -> A:
    """For an answer that shows nothing of itself before its end: act as soon as the router has let it in."""
    with Front(front.url, timeout_s=TIMEOUT_S) as other, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, other)

        def is_open() -> bool:
            return bool(num_open(front)) or answer.done()

        wait_until(is_open, TIMEOUT_S, "the router to let the request in")
        act()
        return answer.result(TIMEOUT_S)
