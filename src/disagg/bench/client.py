"""One request to an OpenAI-compatible server as a record: body, stream, stamps, what went wrong."""

import asyncio
import enum
import time

import msgspec

from disagg.bench.http_client import MAX_ERROR_BYTES, HttpClient, why_silent
from disagg.bench.prompts import PromptSource
from disagg.bench.record import Lapse, RequestRecord
from disagg.bench.sse import EventParser
from disagg.bench.workload import ANSWER_LABEL, WorkRequest
from disagg.core.errors import ConfigurationError

REFUSALS = frozenset({429, 503})
NEEDS_TEXT = "a conversation's next turn needs the answer's text: ask with --api chat or text"


class Api(enum.StrEnum):
    """How prompts travel."""

    CHAT = "chat"  # /v1/chat/completions with messages
    TEXT = "text"  # /v1/completions with text
    IDS = "ids"  # /v1/completions with token ids


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, by a name that other servers have for it


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta = _Delta()

    @property
    def words(self) -> str:
        delta = self.delta
        return self.text or delta.content or delta.reasoning_content or delta.reasoning or ""


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Models(msgspec.Struct, frozen=True):
    class Model(msgspec.Struct, frozen=True):
        id: str

    data: list[Model] = []


class _Stream:
    """What has come of one answer."""

    def __init__(self) -> None:
        self.token_s: list[float] = []
        self.words: list[str] = []
        self.usage: _Usage | None = None
        self.is_over = False
        self.error = b""
        self.begin = b""  # of the body, for messages
        self._parser = EventParser()
        self._decoder = msgspec.json.Decoder(_Chunk)

    def read(self, now_s: float, data: bytes) -> None:
        """Raises ValueError for what is no event stream of an OpenAI-compatible server."""
        if len(self.begin) < MAX_ERROR_BYTES:
            self.begin += data[: MAX_ERROR_BYTES - len(self.begin)]
        for payload in self._parser.feed(data):
            if payload == b"[DONE]":
                self.is_over = True
                continue
            try:
                chunk = self._decoder.decode(payload)
            except msgspec.DecodeError as error:
                raise ValueError(f"{error}: {payload[:200]!r}") from None
            self.usage = chunk.usage or self.usage
            self.error = self.error or bytes(chunk.error)
            words = "".join([choice.words for choice in chunk.choices])
            if words:
                self.token_s.append(now_s)
                self.words.append(words)


class OpenAiClient:
    """Asks one model of one server. Greedy, of exactly the asked length where the server knows ignore_eos."""

    def __init__(
        self,
        http: HttpClient,
        prompts: PromptSource,
        *,
        api: Api,
        model: str,
        timeout_s: float,
        seed: int = 0,
        ignore_eos: bool = True,
    ) -> None:
        """ignore_eos: False for servers that refuse fields which they do not know."""
        self._http = http
        self._prompts = prompts
        self._api = api
        self._model = model
        self._timeout_s = timeout_s
        self._seed = seed
        self._ignores_eos = ignore_eos
        self._answers: dict[int, list[str]] = {}  # of open sessions
        self._path = "/v1/chat/completions" if api is Api.CHAT else "/v1/completions"

    def prepare(self, request: WorkRequest) -> bytes:
        """The body, made before it is due."""
        body: dict[str, object] = {
            "model": request.model or self._model,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "seed": self._seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignores_eos:
            body["ignore_eos"] = True
        answers = self._answers.get(request.session, [])
        if self._api is Api.CHAT:
            body["messages"] = self._prompts.messages(request.runs, answers)
        elif self._api is Api.TEXT:
            body["prompt"] = self._prompts.text(request.runs, answers)
        elif any(run.label == ANSWER_LABEL for run in request.runs):
            raise ConfigurationError(NEEDS_TEXT)
        else:
            body["prompt"] = self._prompts.token_ids(request.runs)
        return msgspec.json.encode(body)

    async def ask(self, request: WorkRequest, content: bytes, start_s: float) -> RequestRecord:
        """Never raises for what the server does. start_s: reading of time.perf_counter() that is zero in the record."""
        stream = _Stream()
        sent_s = time.perf_counter()
        lapse, detail = await self._exchange(content, stream)
        end_s = time.perf_counter()
        usage = stream.usage or _Usage()
        if request.session >= 0 and lapse is None:
            self._answers.setdefault(request.session, []).append("".join(stream.words))
        details = usage.prompt_tokens_details or _PromptDetails()
        return RequestRecord(
            number=request.number,
            due_s=request.due_s,
            sent_s=sent_s - start_s,
            end_s=end_s - start_s,
            token_s=tuple(at_s - start_s for at_s in stream.token_s),
            num_prompt_tokens=usage.prompt_tokens or request.num_prompt_tokens,
            num_output_tokens=usage.completion_tokens or len(stream.token_s),
            num_cached_tokens=details.cached_tokens or 0,
            session=request.session,
            lapse=lapse,
            detail=detail,
        )

    async def _exchange(self, content: bytes, stream: _Stream) -> tuple[Lapse | None, str]:
        def read(now_s: float, data: bytes) -> None:
            if data.startswith(b"{") and not stream.begin:  # an error body, or an answer that is no stream
                stream.begin = data[:MAX_ERROR_BYTES]
                return
            stream.read(now_s, data)

        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._http.post(self._path, content, read)
        except TimeoutError:
            return Lapse.TIMEOUT, f"no end within {self._timeout_s:g} s"
        except OSError as error:
            return Lapse.CONNECTION, str(error)
        except ValueError as error:
            return Lapse.BROKEN, f"no event of an OpenAI-compatible server: {error}"
        text = stream.begin[:300].decode(errors="replace")
        if status in REFUSALS:
            return Lapse.REFUSED, f"HTTP {status}: {text}"
        if status != 200:
            return Lapse.STATUS, f"HTTP {status}: {text}"
        if stream.error:
            return Lapse.ERROR_EVENT, stream.error[:300].decode(errors="replace")
        if not stream.is_over:
            return Lapse.BROKEN, f"no end mark; it began {text!r}"
        if not stream.token_s:
            return Lapse.EMPTY, "no event with text"
        return None, ""


async def find_model(http: HttpClient) -> str:
    """The first that the server names. Raises ConfigurationError."""
    try:
        async with asyncio.timeout(10.0):
            status, body = await http.get("/v1/models")
    except (OSError, TimeoutError) as error:
        raise ConfigurationError(f"no answer from {http.url} ({why_silent(error)}): is it up?") from None
    try:
        models = msgspec.json.decode(body, type=_Models).data if status == 200 else []
    except msgspec.DecodeError:
        models = []
    if not models:
        raise ConfigurationError(f"/v1/models answers {status} and names no model: give one with --model")
    return models[0].id
