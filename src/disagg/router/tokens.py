"""Text to token ids and back, as the model itself would be given them. Bodies are those of vLLM's endpoints."""

from typing import cast

import msgspec

from disagg.core.errors import InvalidRequest
from disagg.router.fields import Fields, JsonObject, wrong_type
from disagg.router.models import ServedModels
from disagg.router.openai_types import read_messages
from disagg.router.tools.spec import read_tool_use


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int | None  # None: no worker has registered yet
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """Answer of POST /detokenize."""

    prompt: str


def tokenize(body: JsonObject, models: ServedModels) -> TokenizeAnswer:
    """Ids of `prompt`, or of `messages` through the chat template. Raises InvalidRequest, ModelNotFound."""
    fields = Fields(body)
    model = fields.text("model") if fields.has("model") else models.only()
    text = models.text(model)
    # All of it is checked, whichever is meant: what is wrong is wrong beside messages too.
    add_prompt = fields.boolean("add_generation_prompt", True)
    add_special = fields.boolean("add_special_tokens", True)
    is_spelled = fields.boolean("return_token_strs")
    shown = read_tool_use(fields).shown
    prompt = fields.text("prompt") if fields.has("prompt") or not fields.has("messages") else ""
    if fields.has("messages"):
        token_ids = text.chat_ids(read_messages(fields), shown, add_generation_prompt=add_prompt)
    else:
        token_ids = tuple(text.tokenizer.encode(prompt, add_special))
    spelled: tuple[str, ...] | None = None
    if is_spelled:
        spelled = tuple(text.tokenizer.decode((token_id,), False) for token_id in token_ids)
    return TokenizeAnswer(len(token_ids), models.statuses()[model].max_context, token_ids, spelled)


def detokenize(body: JsonObject, models: ServedModels) -> DetokenizeAnswer:
    """Text of `tokens`, special ones included. Raises InvalidRequest, ModelNotFound."""
    fields = Fields(body)
    text = models.text(fields.text("model") if fields.has("model") else models.only())
    fields.required("tokens")
    tokens = fields.array("tokens") or []
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise wrong_type("tokens", "an array of token ids (integers)", token)
    if not tokens:
        raise InvalidRequest("'tokens' is empty; give at least one", param="tokens", code="empty_prompt")
    token_ids = text.checked_ids("tokens", tuple(cast(list[int], tokens)))
    return DetokenizeAnswer(text.tokenizer.decode(token_ids, False))
