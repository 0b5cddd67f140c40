"""What the loop is to do after one event, and what the router is to hear first."""

from collections.abc import Collection

from disagg.core.request import EmittedToken
from disagg.protocol.messages import EmitTokens, PromptReport, StageReport
from disagg.scheduler.actions import Action, SendToRouter


class Outgoing:
    """Collects; take() empties it."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._tokens: list[EmittedToken] = []
        self._scored: list[EmittedToken] = []  # with log probabilities of a prompt: large
        self._prompts: list[PromptReport] = []
        self._stages: list[StageReport] = []

    def act(self, *actions: Action) -> None:
        self._actions.extend(actions)

    def emit(self, tokens: Collection[EmittedToken]) -> None:
        plain = [token for token in tokens if token.prompt_logprobs is None]
        self._tokens += plain
        if len(plain) < len(tokens):
            self._scored += [token for token in tokens if token.prompt_logprobs is not None]

    def report_prompt(self, report: PromptReport) -> None:
        self._prompts.append(report)

    def report_stages(self, report: StageReport) -> None:
        self._stages.append(report)

    def take(self) -> list[Action]:
        """All tokens and reports since the last call travel in one message, before anything else.

        Only a token with its prompt's log probabilities has one of its own: a message has a largest size.
        """
        messages = [EmitTokens((token,)) for token in self._scored]
        if self._tokens or self._prompts or self._stages:
            reports = tuple(self._prompts), tuple(self._stages)
            messages.insert(0, EmitTokens(tuple(self._tokens), *reports))
        actions = [*map(SendToRouter, messages), *self._actions] if messages else self._actions
        self._tokens, self._scored, self._prompts = [], [], []
        self._stages, self._actions = [], []
        return actions
