"""One model's text side: conversations and prompts to token ids, checked against the model's limits."""

import msgspec

from disagg.core.errors import InvalidRequest, Unavailable
from disagg.core.grammar import GrammarSpec
from disagg.core.request import SamplingParams
from disagg.dispatch.stream import GenerateRequest, ModelStatus
from disagg.modelfiles.chat_template import ChatMessage, ChatTemplate
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.answer_plan import AnswerPlan, plan_answer
from disagg.router.openai_types import ChatRequest, CompletionRequest, Prompt, SharedParams
from disagg.router.parser_names import ReasoningParser, ToolParser
from disagg.router.reasoning import choose_reasoning
from disagg.router.tools.fallback import spelled_out
from disagg.router.tools.families import choose_parser
from disagg.router.tools.spec import Tool

MAX_PROMPT_SCORES = 500_000  # about 13 bytes each
_NOT_READY_RETRY_S = 2.0


class ModelText:
    """Tokenizer and chat template of one served model. Every method may be called from any thread."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        template: ChatTemplate | None = None,
        *,
        tool_parser: ToolParser = ToolParser.AUTO,
        reasoning_parser: ReasoningParser = ReasoningParser.AUTO,
    ) -> None:
        """Without `template` the model's own are taken, if it has any; AUTO parsers are chosen by them."""
        self.tokenizer = tokenizer
        own = {} if template is not None else tokenizer.vocabulary.chat_templates
        templates = {name: ChatTemplate(source, tokenizer.named_tokens) for name, source in own.items()}
        self._template = template or templates.get("default")
        # Some models have a second one for conversations with tools.
        self._tool_template = templates.get("tool_use", self._template)
        self.tool_parser = choose_parser(tool_parser, self._tool_template.source if self._tool_template else None)
        self.reasoning_parser = choose_reasoning(reasoning_parser, self._template.source if self._template else None)

    def chat_prompt(
        self, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...] = (), *, add_generation_prompt: bool = True
    ) -> str:
        """A conversation, up to where the assistant begins to write. Raises InvalidRequest."""
        has_tools = bool(tools) or any(message.calls or message.role == "tool" for message in messages)
        template = self._tool_template if has_tools else self._template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions with a prompt instead",
                param="messages",
                code="no_chat_template",
            )
        if "developer" not in template.source:
            messages = tuple(
                msgspec.structs.replace(each, role="system") if each.role == "developer" else each for each in messages
            )
        if not template.shows_tools:
            return template.render(spelled_out(messages, tools), add_generation_prompt)
        return template.render(messages, add_generation_prompt, [tool.text for tool in tools])

    def chat_ids(
        self, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...] = (), *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Token ids of such a conversation. Raises InvalidRequest."""
        return self.rendered_ids(self.chat_prompt(messages, tools, add_generation_prompt=add_generation_prompt))

    def rendered_ids(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a rendered conversation, which spells out the special tokens, bos included."""
        return self._encode(prompt, "messages", add_special_tokens=False)

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a plain prompt. Raises InvalidRequest for an empty one and for ids without a token."""
        if isinstance(prompt, str):
            return self._encode(prompt, "prompt", add_special_tokens=True)
        return self.checked_ids("prompt", prompt)

    def checked_ids(self, param: str, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Raises InvalidRequest for an id without a token."""
        size = self.tokenizer.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise _unknown_token(param, token_id, size)
        return token_ids

    def checked_bias(self, logit_bias: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        """Raises InvalidRequest for an id without a token."""
        self.checked_ids("logit_bias", tuple(token_id for token_id, _ in logit_bias))
        return logit_bias

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        ids = self.tokenizer.encode(text, add_special_tokens)
        if not ids:
            raise InvalidRequest(
                f"'{param}' is empty: it has no token at all; give at least one", param=param, code="empty_prompt"
            )
        return tuple(ids)


def _unknown_token(param: str, token_id: int, vocab_size: int) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}' holds token id {token_id}; this model's vocabulary is 0 to {vocab_size - 1}",
        param=param,
        code="token_out_of_vocabulary",
    )


def chat_requests(
    request: ChatRequest, text: ModelText, status: ModelStatus, seed: int
) -> tuple[tuple[GenerateRequest, ...], AnswerPlan]:
    """What to submit for one chat request, and how its answer is read. `seed` is used where the client gave none."""
    prompt = text.chat_prompt(request.messages, request.form.tool_use.shown)
    plan = plan_answer(request.form, text.tool_parser, text.reasoning_parser, prompt)
    prompt_ids = text.rendered_ids(prompt)
    return (_request(request.params, prompt_ids, "messages", text, status, seed, plan.grammar),), plan


def completion_requests(
    request: CompletionRequest, text: ModelText, status: ModelStatus, seed: int
) -> tuple[GenerateRequest, ...]:
    """What to submit for one completion request: one for each prompt, in order."""
    return tuple(
        _request(request.params, text.prompt_ids(prompt), "prompt", text, status, seed) for prompt in request.prompts
    )


def _request(
    params: SharedParams,
    prompt_ids: tuple[int, ...],
    source: str,
    text: ModelText,
    status: ModelStatus,
    seed: int,
    grammar: GrammarSpec | None = None,
) -> GenerateRequest:
    chosen = seed if params.seed is None else params.seed
    # An answer by a grammar ends with the text: after it nothing is allowed.
    eos_ids = () if params.ignores_eos and grammar is None else text.tokenizer.eos_ids
    stop_ids = text.checked_ids("stop_token_ids", params.stop_token_ids)
    _check_num_scores(params.num_scored, len(prompt_ids))
    return GenerateRequest(
        model=params.model,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(
            max_tokens=_max_tokens(params, len(prompt_ids), source, status),
            temperature=params.temperature,
            top_p=params.top_p,
            seed=chosen % 2**63,  # any 64-bit integer is a seed; engines take the non-negative ones
            stop_token_ids=tuple(dict.fromkeys((*eos_ids, *stop_ids))),
            num_logprobs=params.num_logprobs,
            top_k=params.top_k,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=text.checked_bias(params.logit_bias),
            min_tokens=params.min_tokens,
            num_prompt_logprobs=params.num_scored,
            grammar=grammar,
        ),
        num_choices=params.num_choices,
        is_open_ended=params.max_tokens is None,
        is_prompt_only=params.is_prompt_only,
    )


def _check_num_scores(num_top: int | None, num_prompt: int) -> None:
    """All of them travel in one message."""
    if num_top is not None and num_prompt * (num_top + 1) > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"{num_top} log probabilities for each of {num_prompt} prompt tokens are more than "
            f"{MAX_PROMPT_SCORES} in all; ask for fewer or send a shorter prompt",
            param="logprobs",
            code="too_many_logprobs",
        )


def _max_tokens(params: SharedParams, num_prompt: int, source: str, status: ModelStatus) -> int:
    """How many tokens the workers may write. Raises InvalidRequest naming both lengths."""
    limit, wanted = status.max_context, params.max_tokens
    if limit is None:
        raise Unavailable(f"{status.model} is not ready: {status.missing}", retry_after_s=_NOT_READY_RETRY_S)
    room = limit - num_prompt
    needed = 0 if params.is_prompt_only else 1
    if room < needed:
        more = " and the answer needs at least one of them" if needed else ""
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens, but the context of {status.model} is {limit} tokens{more}; "
            "shorten the prompt",
            param=source,
            code="context_length_exceeded",
        )
    if wanted is None and params.min_tokens > room:
        raise InvalidRequest(
            f"'min_tokens' is {params.min_tokens}, but the prompt has {num_prompt} tokens and the context of "
            f"{status.model} is {limit} tokens; ask for at most {room}",
            param="min_tokens",
            code="out_of_range",
        )
    if wanted is None:
        return room
    if wanted > room:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens and max_tokens is {wanted}, together {num_prompt + wanted}, "
            f"but the context of {status.model} is {limit} tokens; shorten the prompt or ask for at most {room}",
            param=source,
            code="context_length_exceeded",
        )
    # Reading a prompt always gives a first token; where none is wanted the router drops it.
    return max(wanted, 1)
