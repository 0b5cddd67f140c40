"""What tests of real processes share: a router's front as a client sees it, its counters, and processes one by one."""

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from disagg.cluster.ports import reserve_port
from disagg.cluster.view import ClusterView
from disagg.core.errors import InternalFault
from disagg.policy.routing import PlacementReason
from disagg.router.config import Announcement, decode_announcement
from disagg.telemetry import metrics as table
from disagg.telemetry.metrics import Metric
from disagg.testing.processes import MarkedProcess, wait_until

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
SMALL = ("--kv-memory", "8M", "--num-threads", "1")  # plenty for tiny models
FAST_BEATS = ("--beat-interval-s", "2.5")
MAX_TRIES = 5  # at an answer that is to be caught in the middle


class Readings(NamedTuple):
    """All samples of one look at /metrics."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def total(self, metric: Metric, **labels: str) -> int:
        """Sum over the samples that carry these labels."""
        wanted = frozenset(labels.items())
        return round(sum(v for (name, own), v in self.samples.items() if name == metric.name and wanted <= own))

    def since(self, before: "Readings") -> "Readings":
        return Readings({key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()})


class Answer(NamedTuple):
    """One whole completion."""

    tokens: tuple[str, ...]  # as the API spells them
    text: str
    finish_reason: str


class Caught(NamedTuple):
    """A stream whose writer stands still in the middle of it."""

    response: httpx.Response
    lines: Iterator[str]  # that were not read yet


class Front:
    """One router over HTTP. Use as a context manager."""

    def __init__(self, url: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self.url = url
        # Proxies of the environment are for the outside world, and reading certificates costs more than a request.
        self.client = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False, verify=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.client.close()

    def post(self, body: Mapping[str, Any], path: str = "/v1/completions") -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, model: str, prompt: str | Sequence[int], max_tokens: int, **more: Any) -> list[Answer]:
        """Whole answers, one per choice. Raises InternalFault for any status but 200."""
        response = self.post(completion(model, prompt, max_tokens, **more))
        if response.status_code != httpx.codes.OK:
            raise InternalFault(f"{response.status_code} instead of an answer: {response.text}")
        choices = response.json()["choices"]
        return [Answer(tuple(c["logprobs"]["tokens"]), c["text"], c["finish_reason"]) for c in choices]

    def readings(self) -> Readings:
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return Readings({(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})

    def cluster(self) -> ClusterView:
        return msgspec.json.decode(self.client.get("/cluster").content, type=ClusterView)

    def health(self) -> httpx.Response:
        """How it stands: 200 once a model can answer."""
        return self.client.get("/ready")

    def is_idle(self, num_workers: int) -> bool:
        """Nothing is open anywhere and every block is free or cached."""
        view = self.cluster()
        if view.router.num_open_requests or len(view.workers) != num_workers:
            return False
        states = [worker.state for worker in view.workers]
        in_use = [
            (s.num_held_blocks, s.num_reserved_blocks, s.num_quarantined_blocks, s.num_running, s.num_waiting)
            for s in states
        ]
        has_reported = all(s.num_free_blocks + s.num_cached_blocks for s in states)
        return has_reported and not any(any(row) for row in in_use) and not any(s.num_handoffs for s in states)

    def wait_idle(self, num_workers: int, timeout_s: float = 20.0) -> None:
        """Raises InternalFault, with what the router says, when something stays in use."""
        try:
            wait_until(lambda: self.is_idle(num_workers), timeout_s, "every block to be free or cached")
        except InternalFault as error:
            raise InternalFault(f"{error}: {self.client.get('/cluster').text}") from None

    def settled(self, num_ended: Mapping[str, int], since: Readings, timeout_s: float = 20.0) -> Readings:
        """What was counted since, once each role's workers have reported that many sequences as ended."""
        found: list[Readings] = []

        def has_settled() -> bool:
            found[:] = [self.readings().since(since)]
            return all(found[0].total(table.SEQUENCES, role=role) >= count for role, count in num_ended.items())

        wait_until(has_settled, timeout_s, f"{dict(num_ended)} sequences to be counted as ended")
        return found[0]

    def wait_counted(self, timeout_s: float = 20.0) -> Readings:
        """The counters once every sequence ever placed has been reported as ended by its writer.

        For a cluster whose processes are all in their first life, between requests.
        """
        found: list[Readings] = []

        def is_counted() -> bool:
            found[:] = [self.readings()]
            ended = [found[0].total(table.SEQUENCES, role=role) for role in ("prefill", "decode", "mixed")]
            num_remote = found[0].total(table.PLACEMENTS, reason=PlacementReason.LONG_PROMPT)
            return ended[0] == num_remote and sum(ended[1:]) == found[0].total(table.PLACEMENTS)

        wait_until(is_counted, timeout_s, "every sequence to be counted as ended")
        return found[0]


def completion(model: str, prompt: str | Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A body whose answer is greedy, as long as asked and lists its tokens, unless told otherwise."""
    asked = prompt if isinstance(prompt, str) else list(prompt)
    body = {"model": model, "prompt": asked, "max_tokens": max_tokens, "temperature": 0}
    return {**body, "logprobs": 0, "ignore_eos": True, **more}


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """TCP ports on loopback that nobody else is given meanwhile, all different; a server that is told to take one may.

    Until then who connects is refused.
    """
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(reserve_port("127.0.0.1")).getsockname()[1] for _ in range(count)]


def router(models: Mapping[str, object], *more: str, port: int = 0, control_port: int = 0) -> MarkedProcess:
    """`disagg router` over models by name; not started yet."""
    named = [argument for name, path in models.items() for argument in ("--model", f"{name}={path}")]
    return MarkedProcess(("router", *named, "--port", str(port), "--control-port", str(control_port), *more))


def worker(model: object, role: str, worker_id: str, control: str, *more: str) -> MarkedProcess:
    """`disagg worker`; not started yet."""
    who = ("--role", role, "--worker-id", worker_id, "--router-address", control)
    return MarkedProcess(("worker", str(model), *who, *SMALL, *more))


def announced(process: MarkedProcess) -> Announcement:
    """Where a started router listens."""
    found = decode_announcement(process.wait_line(r'^\{"http"', START_TIMEOUT_S))
    assert found is not None
    return found


def is_ready(front: Front) -> bool:
    return front.health().status_code == httpx.codes.OK


def stop(*pids: int) -> None:
    """They do nothing more, and keep all they have."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def go_on(*pids: int) -> None:
    """Those that still live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def standing_still(*pids: int) -> Iterator[None]:
    """While something else happens that must not come too late: an answer does not end before it."""
    stop(*pids)
    try:
        yield
    finally:
        go_on(*pids)


@contextlib.contextmanager
def caught(front: Front, body: Mapping[str, Any], writers: Sequence[int], num_events: int = 1) -> Iterator[Caught]:
    """Ask for a stream, read its first events, and stop these processes, who write it.

    An answer that is over by then proves nothing: whoever reads may have had to wait for its turn. It is asked again.
    """
    for _ in range(MAX_TRIES):
        with front.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            for line in itertools.islice(filter(None, lines), num_events):
                assert line.startswith("data: "), line
            with standing_still(*writers):
                # What they had written before is with the router by the second look.
                if all(front.cluster().router.num_open_requests for _ in range(2)):
                    yield Caught(response, lines)
                    return
    raise InternalFault(f"{MAX_TRIES} answers were over before their writers stood still")
