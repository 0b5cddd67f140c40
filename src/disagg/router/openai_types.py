"""Requests of OpenAI's API as typed values, read with care from JSON.

Unknown keys are ignored. Known ones that would change the answer and are not supported yet are refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Final, cast

import msgspec

from disagg.core.errors import InvalidRequest
from disagg.modelfiles.chat_template import ChatMessage
from disagg.router.answer_plan import AnswerForm, read_form
from disagg.router.fields import Fields, JsonObject, kind_of, wrong_type
from disagg.router.tools.turns import first_stray, read_call_id, read_calls

MAX_CHOICES: Final = 128  # of one request, over all its prompts
MAX_STOPS: Final = 4
MAX_STOP_CHARACTERS: Final = 1024
MAX_CHAT_LOGPROBS: Final = 20
MAX_COMPLETION_LOGPROBS: Final = 5
MAX_BIASED_TOKENS: Final = 1024
MAX_STOP_TOKENS: Final = 128
MAX_PROMPT_LOGPROBS: Final = 20
DEFAULT_COMPLETION_TOKENS: Final = 16
MAX_TOKENS: Final = 2**31 - 1
_MAX_TOKEN_DIGITS: Final = 10
INT64: Final = (-(2**63), 2**63 - 1)
_MAX_BIAS: Final = 100.0
MAX_PENALTY: Final = 2.0
# Any factor above 0 would do; past these scores leave float32.
REPETITION_PENALTY: Final = (0.01, 100.0)
ROLES: Final = ("system", "developer", "user", "assistant", "tool")

# Parts of others' APIs that would change the answer, and their values that would not, besides null.
REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    # Forms of answers in other servers' words; `response_format` is ours.
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), (False,)),
    **dict.fromkeys(("json_schema", "grammar", "regex", "ebnf"), ("",)),
}
REFUSED_IN_CHAT: Final[Mapping[str, tuple[object, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "reasoning_effort": ("none",),
    "echo": (False,),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
}

Prompt = str | tuple[int, ...]


class SharedParams(msgspec.Struct, frozen=True):
    """What both endpoints take."""

    model: str
    num_choices: int
    max_tokens: int | None  # None: as many as fit
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    num_logprobs: int | None
    continuous_usage: bool = False  # each chunk carries the counts so far
    echo: bool = False  # the prompt comes before the answer
    ignores_eos: bool = False  # an extension that load generators use: write on past the end of the text
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its score), by token id
    # Not in OpenAI's API; named and meant as in vLLM's.
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int | None = None

    @property
    def is_prompt_only(self) -> bool:
        """Nothing is to be written: max_tokens is 0."""
        return self.max_tokens == 0

    @property
    def num_scored(self) -> int | None:
        """Likeliest tokens wanted at each place of the prompt, for an echo or by themselves; None: no scores."""
        echoed = self.num_logprobs if self.echo else None
        wanted = [number for number in (echoed, self.num_prompt_logprobs) if number is not None]
        return max(wanted, default=None)


class ChatRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/chat/completions."""

    params: SharedParams
    messages: tuple[ChatMessage, ...]
    form: AnswerForm = AnswerForm()


class CompletionRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/completions: one answer (times n) for each prompt."""

    params: SharedParams
    prompts: tuple[Prompt, ...]


def read_chat(body: JsonObject) -> ChatRequest:
    """Raises InvalidRequest naming the first field that is wrong."""
    fields = Fields(body)
    model = fields.text("model")
    form = read_form(fields)
    for key, neutral in REFUSED_IN_CHAT.items():
        fields.refuse_unless(key, *neutral)
    messages = read_messages(fields)
    older, newer = _read_lengths(fields, 1)
    max_tokens = older if newer is None else newer
    top = fields.integer("top_logprobs", 0, MAX_CHAT_LOGPROBS)
    wants_logprobs = fields.boolean("logprobs")
    if top is not None and not wants_logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
    num_logprobs = (top or 0) if wants_logprobs else None
    return ChatRequest(_read_common(fields, model, max_tokens, num_logprobs), messages, form)


def read_completion(body: JsonObject) -> CompletionRequest:
    """Raises InvalidRequest naming the first field that is wrong."""
    fields = Fields(body)
    model = fields.text("model")
    fields.refuse_unless("suffix", "")
    fields.refuse_unless("response_format", {"type": "text"})
    prompts = _read_prompts(fields)
    older, newer = _read_lengths(fields, 0)
    max_tokens = newer if older is None else older
    if max_tokens is None and "max_tokens" not in fields.values:  # null says that there is no limit but the context
        max_tokens = DEFAULT_COMPLETION_TOKENS
    if isinstance(fields.values.get("logprobs"), bool):
        raise wrong_type("logprobs", f"an integer from 0 to {MAX_COMPLETION_LOGPROBS}", fields.values["logprobs"])
    num_logprobs = fields.integer("logprobs", 0, MAX_COMPLETION_LOGPROBS)
    params = _read_common(fields, model, max_tokens, num_logprobs, echo=fields.boolean("echo"))
    if params.num_choices * len(prompts) > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n={params.num_choices} are more than {MAX_CHOICES} answers; send fewer",
            param="prompt",
        )
    return CompletionRequest(params, prompts)


def _read_common(
    fields: Fields, model: str, max_tokens: int | None, num_logprobs: int | None, *, echo: bool = False
) -> SharedParams:
    if fields.has("user"):
        fields.text("user")
    for key, neutral in REFUSED.items():
        fields.refuse_unless(key, *neutral)
    fields.refuse_unless("best_of", fields.values.get("n") or 1)
    stream = fields.boolean("stream")
    options = fields.nested("stream_options")
    if options is not None and not stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true", param="stream_options")
    return SharedParams(
        model=model,
        num_choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=_read_top_p(fields),
        seed=fields.integer("seed", *INT64),
        stop=_read_stop(fields),
        stream=stream,
        include_usage=options.boolean("include_usage") if options is not None else False,
        continuous_usage=options.boolean("continuous_usage_stats") if options is not None else False,
        num_logprobs=num_logprobs,
        echo=echo,
        ignores_eos=fields.boolean("ignore_eos"),
        presence_penalty=fields.number("presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_read_logit_bias(fields),
        top_k=max(fields.integer("top_k", -1, MAX_TOKENS) or 0, 0),  # -1 means all too
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, *REPETITION_PENALTY),
        min_tokens=_read_min_tokens(fields, max_tokens),
        stop_token_ids=_read_stop_token_ids(fields),
        num_prompt_logprobs=_read_prompt_logprobs(fields, stream=stream),
    )


def _read_lengths(fields: Fields, low: int) -> tuple[int | None, int | None]:
    """max_tokens and its newer name. Both are checked, whichever counts."""
    return fields.integer("max_tokens", low, MAX_TOKENS), fields.integer("max_completion_tokens", low, MAX_TOKENS)


def _read_stop_token_ids(fields: Fields) -> tuple[int, ...]:
    values = fields.array("stop_token_ids") or []
    if len(values) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"'stop_token_ids' has {len(values)} ids; at most {MAX_STOP_TOKENS} are allowed", param="stop_token_ids"
        )
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type("stop_token_ids", "an array of token ids (integers)", value)
    return tuple(dict.fromkeys(cast(list[int], values)))


def _read_prompt_logprobs(fields: Fields, *, stream: bool) -> int | None:
    number = fields.integer("prompt_logprobs", 0, MAX_PROMPT_LOGPROBS)
    if number is not None and stream:
        raise InvalidRequest("'prompt_logprobs' come with whole answers only; leave 'stream' out", param="stream")
    return number


def _read_logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """An object of token ids, spelled as strings, and what is added to their scores."""
    biases = fields.nested("logit_bias")
    if biases is None:
        return ()
    if len(biases.values) > MAX_BIASED_TOKENS:
        raise InvalidRequest(
            f"'logit_bias' has {len(biases.values)} tokens; at most {MAX_BIASED_TOKENS} are allowed", param="logit_bias"
        )
    read: dict[int, float] = {}
    for key in biases.values:
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_TOKEN_DIGITS):
            raise InvalidRequest(
                f"'logit_bias' names {key[:40]!r}; its keys must be token ids", param="logit_bias", code="invalid_type"
            )
        read[int(key)] = biases.number(key, 0.0, -_MAX_BIAS, _MAX_BIAS)
    return tuple(sorted(read.items()))


def _read_min_tokens(fields: Fields, max_tokens: int | None) -> int:
    min_tokens = fields.integer("min_tokens", 0, MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' is {min_tokens}, but the answer has at most {max_tokens} tokens; "
            "ask for fewer or raise max_tokens",
            param="min_tokens",
            code="out_of_range",
        )
    return min_tokens


def _read_top_p(fields: Fields) -> float:
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    # OpenAI takes 0 too; the smallest nucleus is the likeliest token alone.
    return max(top_p, 1e-9)


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.values.get("stop")
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"'stop' has {len(stops)} strings; at most {MAX_STOPS} are allowed", param="stop")
    for stop in stops:
        if not isinstance(stop, str):
            raise wrong_type("stop", f"a string or an array of up to {MAX_STOPS} strings", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"a string in 'stop' has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARACTERS}", param="stop"
            )
    return tuple(dict.fromkeys(cast(list[str], stops)))


def _read_prompts(fields: Fields) -> tuple[Prompt, ...]:
    """A string, an array of strings, an array of token ids, or an array of arrays of token ids."""
    value = fields.required("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string or an array", value)
    if not value:
        raise _empty_prompt("prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) for item in value):
        return tuple(_read_token_ids(f"prompt[{place}]", item) for place, item in enumerate(value))
    return (_read_token_ids("prompt", value),)


def _read_token_ids(name: str, values: Sequence[object]) -> tuple[int, ...]:
    if not values:
        raise _empty_prompt(name)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(
                f"'{name}' must hold either strings or token ids (integers), found {kind_of(value)}",
                param="prompt",
                code="invalid_type",
            )
    return tuple(cast(Sequence[int], values))


def _empty_prompt(name: str) -> InvalidRequest:
    return InvalidRequest(f"'{name}' is empty; give at least one token", param="prompt", code="empty_prompt")


def read_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """`messages` of a body. Raises InvalidRequest."""
    fields.required("messages")
    values = fields.array("messages")
    if not values:
        raise InvalidRequest("'messages' is empty; give at least one message", param="messages", code="empty_prompt")
    messages = tuple(_read_message(f"messages[{place}]", value) for place, value in enumerate(values))
    stray = first_stray(messages)
    if stray is not None:
        raise InvalidRequest(
            f"'messages[{stray}]' answers the call {(messages[stray].call_id or '')[:80]!r}, which the turn before it "
            "does not make; a 'tool' message follows the 'tool_calls' that it answers",
            param=f"messages[{stray}].tool_call_id",
        )
    return messages


def _read_message(name: str, value: object) -> ChatMessage:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    fields = Fields(cast(JsonObject, value), f"{name}.")
    role = fields.text("role")
    if role not in ROLES:
        raise InvalidRequest(f"'{name}.role' is {role!r}; it must be one of {', '.join(ROLES)}", param=f"{name}.role")
    calls = read_calls(fields) if role == "assistant" else ()
    fields.refuse_unless("function_call")
    fields.refuse_unless("audio")
    # An assistant's turn may be without content; nobody else's.
    is_optional = role == "assistant" and not fields.has("content")
    content = "" if is_optional else _read_content(fields.name("content"), fields.required("content"))
    reasoning = fields.text("reasoning_content") if role == "assistant" and fields.has("reasoning_content") else None
    speaker = fields.text("name") if fields.has("name") else None
    return ChatMessage(role, content, speaker, calls, read_call_id(fields) if role == "tool" else None, reasoning)


def _read_content(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(name, "a string or an array of parts", value)
    if not value:
        raise InvalidRequest(f"'{name}' is an empty array; give at least one part", param=name)
    return "\n".join(_read_part(f"{name}[{place}]", part) for place, part in enumerate(value))


def _read_part(name: str, value: object) -> str:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    fields = Fields(cast(JsonObject, value), f"{name}.")
    kind = fields.text("type")
    if kind != "text":
        raise InvalidRequest(
            f"'{name}.type' is {kind!r}; only 'text' is supported", param=f"{name}.type", code="unsupported_parameter"
        )
    return fields.text("text")
