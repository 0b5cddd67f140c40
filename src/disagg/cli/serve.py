"""The loop of `disagg serve`.

1  signals: the first Ctrl-C (or SIGTERM, SIGHUP) stops in order, the second kills; SIGUSR1 restarts the workers in turn
2  start the router and the workers, wait until all is ready, show how to try it
3  show the workers until told to stop, or until serving cannot go on
4  whatever happened: end every process before returning
"""

import asyncio
import json
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from disagg.cli.display import Display, make_display, worker_lines
from disagg.cluster.local import PROGRAM, LocalCluster
from disagg.cluster.plan import LocalPlan
from disagg.core.errors import InternalFault

SHOW_INTERVAL_S = 1.0
RESTART_SIGNAL = signal.SIGUSR1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORCED_EXIT_CODE = 130

T = TypeVar("T")


class StopRequested(Exception):  # control flow inside this file only
    """A signal asked for the end."""


class StopSwitch:
    """Counts requests to stop: one is polite, two are not."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._first = asyncio.Event()
        self._second = asyncio.Event()

    def press(self) -> None:
        self.num_requests += 1
        (self._first if self.num_requests == 1 else self._second).set()

    async def unless_pressed(self, work: Coroutine[None, None, T]) -> T:
        """The work's result; StopRequested when the switch is pressed first (the work is cancelled)."""
        task = asyncio.ensure_future(work)
        pressed = asyncio.ensure_future(self._first.wait())
        waiting: set[asyncio.Future[Any]] = {task, pressed}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            was_done = task.done()
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not was_done:
            raise StopRequested
        return task.result()

    async def pressed_again(self) -> None:
        await self._second.wait()


def run_serve(
    plan: LocalPlan, *, start_timeout_s: float, stop_timeout_s: float, program: tuple[str, ...] = PROGRAM
) -> int:
    """Serve until a signal; the exit code. Raises ConfigurationError, InternalFault; nothing is left either way."""
    display = make_display()
    try:
        return asyncio.run(_serve(plan, display, program, start_timeout_s, stop_timeout_s))
    finally:
        display.close()


async def _serve(
    plan: LocalPlan, display: Display, program: tuple[str, ...], start_timeout_s: float, stop_timeout_s: float
) -> int:
    switch = StopSwitch()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        # nohup hands SIGHUP down ignored; that wish is respected.
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, switch.press)
    restart = asyncio.Event()
    loop.add_signal_handler(RESTART_SIGNAL, restart.set)
    cluster = LocalCluster(
        plan,
        on_line=lambda name, _stream, line: display.child_line(name, line),
        on_exit=lambda event: display.note(event.describe()),
        program=program,
    )
    try:
        await switch.unless_pressed(_run(cluster, plan, display, start_timeout_s, restart))
    except StopRequested:
        display.note("stopping (Ctrl-C again: at once)")
    finally:
        await _stop(cluster, switch, stop_timeout_s)
    return 0 if switch.num_requests < 2 else FORCED_EXIT_CODE


async def _run(
    cluster: LocalCluster, plan: LocalPlan, display: Display, start_timeout_s: float, restart: asyncio.Event
) -> None:
    """Returns only by an error: serving ends by a signal or because it cannot go on."""
    url = await cluster.start()
    names = [worker.worker_id for worker in plan.workers]
    display.note(f"starting {', '.join(names)}")
    await cluster.wait_ready(start_timeout_s, display.note)
    for line in invitation(url, plan.router.models[0][0]):
        display.note(line)
    failure = asyncio.ensure_future(cluster.failed())
    running = [
        asyncio.ensure_future(_show(cluster, names, display)),
        asyncio.ensure_future(cluster.watch()),
        asyncio.ensure_future(_restart_when_asked(cluster, restart, display)),
    ]
    try:
        done, _ = await asyncio.wait({failure, *running}, return_when=asyncio.FIRST_COMPLETED)
        for future in done - {failure}:
            future.result()
        raise InternalFault(failure.result())
    finally:
        for future in (failure, *running):
            future.cancel()
        await asyncio.gather(failure, *running, return_exceptions=True)


async def _restart_when_asked(cluster: LocalCluster, asked: asyncio.Event, display: Display) -> None:
    while True:
        await asked.wait()
        asked.clear()
        await cluster.restart(display.note)


async def _show(cluster: LocalCluster, names: list[str], display: Display) -> None:
    loop = asyncio.get_running_loop()
    while True:
        view = await cluster.view()
        display.show(worker_lines(names, view.workers if view else (), cluster.processes()), loop.time())
        await asyncio.sleep(SHOW_INTERVAL_S)


async def _stop(cluster: LocalCluster, switch: StopSwitch, timeout_s: float) -> None:
    stopping = asyncio.ensure_future(cluster.stop(timeout_s))
    forcing = asyncio.ensure_future(switch.pressed_again())
    await asyncio.wait({stopping, forcing}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        cluster.kill()
    forcing.cancel()
    await asyncio.gather(forcing, return_exceptions=True)
    await stopping


def invitation(url: str, model: str) -> tuple[str, ...]:
    """Where it listens and two lines to paste: one for a shell, one for Python."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32})
    python = (
        "import openai; "
        f"print(openai.OpenAI(base_url='{url}/v1', api_key='-').chat.completions.create("
        f"model='{model}', messages=[{{'role': 'user', 'content': 'Hello!'}}], max_tokens=32)"
        ".choices[0].message.content)"
    )
    return (
        f"{model} is ready at {url}",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        f'  python -c "{python}"',
    )
