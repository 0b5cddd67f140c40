"""An OpenAI-compatible server that thinks for a known time: what a load generator measures can be checked against it.

    python -m disagg.testing.openai_server [--ttft-s 0.1] [--gap-s 0.02] [--port 0]

The n-th token of an answer leaves ttft_s + n * gap_s after its request has been read, each in an event of its own.
Every `fail_every`-th request answers 503, every `break_every`-th breaks off after its first token.
"""

import argparse
import asyncio
import contextlib
import re
import selectors
import time

import msgspec

from disagg.channel.lifeline import watch_parent

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"fake","object":"model"}]}'


class Delays(msgspec.Struct, frozen=True):
    """Of each answer. max_at_once: requests beyond wait in turn; 0: no bound."""

    ttft_s: float = 0.1
    gap_s: float = 0.02
    fail_every: int = 0
    break_every: int = 0
    max_at_once: int = 0


class _Asked(msgspec.Struct, frozen=True):
    max_tokens: int = 16
    prompt: str | list[int] = ""
    stream: bool = False


class FakeOpenAiServer:
    """One loop only. `async with`; url is set once it listens."""

    def __init__(self, delays: Delays, port: int = 0) -> None:
        self.url = ""
        self.num_requests = 0
        self.num_open = 0
        self.most_open = 0
        self.bodies: list[bytes] = []  # of the first hundred
        self._delays = delays
        self._port = port
        self._turn = asyncio.Semaphore(delays.max_at_once or 1 << 30)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def __aenter__(self) -> "FakeOpenAiServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                if head.startswith(b"GET "):
                    _plain(writer, b"200 OK", _MODELS if b"/models" in head else b"{}")
                else:
                    await self._answer(body, time.perf_counter(), writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            if not self._is_closing:
                raise
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, body: bytes, start_s: float, writer: asyncio.StreamWriter) -> None:
        self.num_requests += 1
        number = self.num_requests
        if len(self.bodies) < 100:
            self.bodies.append(body)
        asked = msgspec.json.decode(body, type=_Asked)
        if _is_due(number, self._delays.fail_every):
            _plain(writer, b"503 Service Unavailable", b'{"error":{"message":"as told"}}')
            return
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async with self._turn:
                if self._delays.max_at_once:
                    start_s = time.perf_counter()
                await self._stream(asked, start_s, writer, is_broken=_is_due(number, self._delays.break_every))
        finally:
            self.num_open -= 1

    async def _stream(self, asked: _Asked, start_s: float, writer: asyncio.StreamWriter, *, is_broken: bool) -> None:
        writer.write(_HEAD)
        for position in range(asked.max_tokens):
            await _until(start_s + self._delays.ttft_s + position * self._delays.gap_s)
            _event(writer, b'{"choices":[{"index":0,"text":"w","delta":{"content":"w"}}]}')
            if is_broken:
                raise ConnectionAbortedError
        num_prompt = len(asked.prompt) if isinstance(asked.prompt, list) else len(asked.prompt.split())
        usage = f'{{"choices":[],"usage":{{"prompt_tokens":{num_prompt},"completion_tokens":{asked.max_tokens}}}}}'
        _event(writer, usage.encode())
        _event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")

    def check_invariants(self) -> None:
        assert 0 <= self.num_open <= self.num_requests


def _is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _event(writer: asyncio.StreamWriter, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(event), event))


def _plain(writer: asyncio.StreamWriter, status: bytes, body: bytes) -> None:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    writer.write(head + body)


async def _until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))


def precise_loop() -> asyncio.AbstractEventLoop:
    """Its timers are right to some microseconds, not to one millisecond; for up to a thousand connections."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def _run(delays: Delays, port: int) -> None:
    async with FakeOpenAiServer(delays, port) as server:
        print(f"is ready at {server.url}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ttft-s", type=float, default=0.1)
    parser.add_argument("--gap-s", type=float, default=0.02)
    parser.add_argument("--max-at-once", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    watch_parent()
    delays = Delays(ttft_s=args.ttft_s, gap_s=args.gap_s, max_at_once=args.max_at_once)
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(_run(delays, args.port))


if __name__ == "__main__":
    main()
