"""A router and workers with fake engines in one event loop over real connections, and seeded delays at every await.

`delay_every_await` makes each task of the loop sleep a little, or not, whenever it goes on after having waited. Steps
are delayed on their own thread by `LateEngine`. What one stream carries stays in order; everything else may change.
"""

import asyncio
import contextlib
import random
import threading
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any

import msgspec
from tests.unit.worker.rigs import DEADLINE_S, VOCAB, Site, layout, until

from disagg.channel.channel import DEFAULT_BEAT_INTERVAL_S
from disagg.channel.keys import load_keys
from disagg.core.ids import Incarnation, SequenceId
from disagg.core.request import SamplingParams
from disagg.core.roles import Role
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.dispatcher import Dispatcher
from disagg.dispatch.stream import GenerateRequest, RequestFailed, TokensDelivered, TokenStream
from disagg.kvcache.memory import Landing, Memory, Segment
from disagg.protocol.cards import PROTOCOL_MAX, PROTOCOL_MIN
from disagg.router.service import LiveService
from disagg.scheduler.engine import OnLayers, StepPlan, StepResult
from disagg.testing.engine import FakeEngine, expected_tokens
from disagg.worker.links import RouterLink

NUM_BLOCKS = 64
MODEL = "fake"
ANSWER_TIMEOUT_S = 4 * DEADLINE_S  # with delays at every await, beside others, on a busy machine


class LateEngine(FakeEngine):
    """Takes its seeded time over each layer, on the step thread."""

    def __init__(self, seed: int, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__(layout(), num_blocks, VOCAB)
        self._random = random.Random(seed)

    def run_step(self, plan: StepPlan, on_layers: OnLayers) -> StepResult:
        def late(num_layers: int) -> None:
            time.sleep(self._random.choice([0.0, 0.0, 0.002]))
            on_layers(num_layers)

        return super().run_step(plan, late)


class GatedEngine(FakeEngine):
    """While `gate` is closed no byte of a peer lands here; its own steps go on."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__(layout(), num_blocks, VOCAB)
        self.gate = threading.Event()
        self.gate.set()
        self.num_waiting = 0

    @property
    def memory(self) -> Memory:
        return _Gated(self, super().memory)


class _Gated:
    def __init__(self, engine: GatedEngine, memory: Memory) -> None:
        self._engine = engine
        self._memory = memory

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def gather(self, segments: Sequence[Segment]) -> list[memoryview]:
        return self._memory.gather(segments)

    def landing(self, segments: Sequence[Segment]) -> Landing:
        if not self._engine.gate.is_set():
            self._engine.num_waiting += 1
        assert self._engine.gate.wait(ANSWER_TIMEOUT_S), "the gate stayed closed"
        return self._memory.landing(segments)


@contextlib.asynccontextmanager
async def live_router(
    port: int = 0,
    incarnation: int = 5,
    beat_interval_s: float = DEFAULT_BEAT_INTERVAL_S,
    keys: str = "",
    protocol: tuple[int, int] = (PROTOCOL_MIN, PROTOCOL_MAX),
) -> AsyncIterator[tuple[LiveService, str]]:
    """A router without its HTTP side, and the address of its control port."""
    config = DispatcherConfig(Incarnation(incarnation), tokenizer_digests={MODEL: "tok"}, local_prefill_tokens=0)
    config = msgspec.structs.replace(config, protocol_min=protocol[0], protocol_max=protocol[1])
    made = LiveService(Dispatcher(config), beat_interval_s=beat_interval_s, keys=load_keys(keys))
    address = await made.listen("127.0.0.1", port)
    try:
        yield made, address
    finally:
        made.check_invariants()
        await made.close()


@contextlib.asynccontextmanager
async def live_worker(
    name: str,
    role: Role,
    address: str,
    engine: FakeEngine | None = None,
    *,
    keys: str = "",
    protocol: tuple[int, int] | None = None,
) -> AsyncIterator[Site]:
    """A worker that keeps up its connection to the router at this address, or will once it is there."""
    made = Site(name, role, layout(), NUM_BLOCKS, keys=keys)
    if engine is not None:
        made.engine = engine
    await made.open()
    if protocol is not None:
        made.peers.card = msgspec.structs.replace(made.peers.card, protocol_min=protocol[0], protocol_max=protocol[1])
    link = RouterLink(made.worker, made.peers, address, DEFAULT_BEAT_INTERVAL_S, load_keys(keys))
    tasks = [asyncio.create_task(link.run()), asyncio.create_task(link.report_states())]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await link.close()
        await made.close()


def num_pairs(served: LiveService) -> int:
    return sum(len(record.partners) for record in served.dispatcher.registry.records())


async def paired(served: LiveService, count: int = 1) -> None:
    await until(lambda: num_pairs(served) >= count)


def ask(
    served: LiveService, number: int, num_prompt: int = 30, max_tokens: int = 6
) -> tuple[GenerateRequest, TokenStream]:
    prompt = tuple((31 * number + 7 * index + number * index) % 900 for index in range(num_prompt))
    sampling = SamplingParams(max_tokens, temperature=0.8, seed=number)
    request = GenerateRequest(MODEL, prompt, sampling)
    return request, served.submit(request)


async def read_whole(request: GenerateRequest, stream: TokenStream, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
    """Fails when the answer is not the undisturbed engine's, or takes too long."""
    tokens: list[int] = []
    async with asyncio.timeout(timeout_s):
        async for event in stream.events():
            assert not isinstance(event, RequestFailed), event.error
            assert isinstance(event, TokensDelivered)
            tokens += [token.token_id for token in event.tokens]
    sequence_id = SequenceId(stream.request_id, 0)
    assert tokens == expected_tokens(layout(), sequence_id, request.prompt_ids, request.sampling)


async def settled(*sites: Site) -> None:
    for made in sites:
        await made.settled()


# --- delays ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def delay_every_await(seed: int, most_s: float = 0.003) -> Iterator[random.Random]:
    """For tasks made from now on in the running loop."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()

    def pause() -> Awaitable[None]:
        return asyncio.sleep(rng.choice([0.0, 0.0, 0.0, rng.uniform(0.0, most_s)]))

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> "asyncio.Task[Any]":
        return asyncio.Task(_late(coro, pause), loop=loop, **more)

    loop.set_task_factory(factory)
    try:
        yield rng
    finally:
        loop.set_task_factory(before)


async def _late(coro: Coroutine[Any, Any, Any], pause: Callable[[], Awaitable[None]]) -> Any:
    return await _drive(coro, pause)


@types.coroutine
def _drive(coro: Coroutine[Any, Any, Any], pause: Callable[[], Awaitable[None]]) -> Generator[Any, Any, Any]:
    """Run a coroutine; each time that what it waited for has come, let it wait a little longer."""
    resume, value = coro.send, None
    while True:
        try:
            waits_for = resume(value)
        except StopIteration as stop:
            return stop.value
        resume, value = coro.send, None
        try:
            value = yield waits_for
            yield from pause().__await__()
        except BaseException as error:  # a cancellation is the coroutine's to take
            resume, value = coro.throw, error
