"""From what a chat request says of its answer's form to a grammar for the workers and a reading for the router.

response_format   what the answer says is a document       grammar
tools, auto       the model may call                        reading
strict tools      the model may call, but then by a schema  grammar and reading
tools, enforced   the model calls, and says nothing else    grammar and reading
both              a document, or calls                      grammar and reading
<think>           comes before any of them                  grammar lets it pass, reading takes it out
"""

import msgspec

from disagg.core.errors import InvalidRequest
from disagg.core.grammar import GrammarKind, GrammarSpec
from disagg.modelfiles.grammar import can_check_grammars
from disagg.router.fields import Fields
from disagg.router.message_reader import MessageReading
from disagg.router.parser_names import ReasoningParser, ToolParser
from disagg.router.reasoning import has_opened
from disagg.router.response_format import ResponseFormat, checked, read_response_format
from disagg.router.tools.families import call_rules, chosen_call_rules
from disagg.router.tools.spec import ToolUse, read_tool_use

# White space after what is thought; of what is thought itself nothing is known but its end.
_THINKING = r"""
gap: /[ \r\n]{0,8}/
thought[lazy]: /(.|\n)*<\/think>/
whole_thought[lazy]: /\s{0,8}<think>(.|\n)*<\/think>/"""


class AnswerForm(msgspec.Struct, frozen=True):
    """What a chat request says of its answer's form."""

    tool_use: ToolUse = ToolUse()
    response_format: ResponseFormat | None = None

    @property
    def needs_grammar(self) -> bool:
        use = self.tool_use
        return self.response_format is not None or use.is_enforced or use.is_enforced_once_begun


class AnswerPlan(msgspec.Struct, frozen=True):
    """What is done about it."""

    grammar: GrammarSpec | None = None
    reading: MessageReading | None = None  # None: the text is the message's content, as it is


def read_form(fields: Fields) -> AnswerForm:
    """Raises InvalidRequest naming the field that is wrong."""
    form = AnswerForm(read_tool_use(fields), read_response_format(fields))
    if form.needs_grammar and fields.integer("min_tokens", 0, 2**31):
        enforced = "an enforced 'tool_choice'" if form.tool_use.is_enforced else "'strict' tools"
        what = "'response_format'" if form.response_format is not None else enforced
        raise InvalidRequest(
            f"'min_tokens' cannot be kept together with {what}: an answer ends where its form does; leave it out",
            param="min_tokens",
        )
    return form


def plan_answer(form: AnswerForm, tools: ToolParser, reasoning: ReasoningParser, prompt: str) -> AnswerPlan:
    """tools and reasoning: the model's family, never AUTO. prompt: the rendered text.

    Raises InvalidRequest for tools where none are parsed, and for grammars that no answer could follow.
    """
    use = form.tool_use
    if use.shown and tools is ToolParser.NONE:
        text = "calls of this model are not parsed here (--tool-parser none): leave 'tools' out"
        raise InvalidRequest(text, param="tools", code="unsupported_parameter")
    is_thinking = reasoning is ReasoningParser.THINK
    is_open = is_thinking and has_opened(prompt)
    reading = None
    if use.shown or is_thinking:
        names = tuple(tool.name for tool in use.shown)
        reading = MessageReading(tools, names, use.mode, use.is_parallel, is_thinking, is_open)
    return AnswerPlan(_grammar(form, tools, is_thinking=is_thinking, is_open=is_open), reading)


def _grammar(form: AnswerForm, tools: ToolParser, *, is_thinking: bool, is_open: bool) -> GrammarSpec | None:
    use, answer = form.tool_use, form.response_format
    if can_check_grammars():
        for place, tool in enumerate(use.shown):
            checked(GrammarSpec(GrammarKind.JSON_SCHEMA, tool.schema), f"tools[{place}].function.parameters")
    if not form.needs_grammar:
        return None
    if answer is not None:
        document = checked(GrammarSpec(GrammarKind.JSON_SCHEMA, answer.schema), answer.param)
        if not (use.shown or is_thinking):
            return document
    may_think = is_thinking and not is_open
    start = "thought gap body" if is_open else "whole_thought gap body | first" if may_think else "body"
    thinking = [_THINKING] if is_thinking else []
    text = "\n".join([f"start: {start}", _body_rules(form, tools, may_think=may_think), *thinking])
    param = "tools" if answer is None or use.is_enforced else "response_format"
    return checked(GrammarSpec(GrammarKind.LARK, text), param)


def _body_rules(form: AnswerForm, tools: ToolParser, *, may_think: bool) -> str:
    """What follows a thought is the rule `body`; what comes without one, where one may_think, the rule `first`."""
    use, answer = form.tool_use, form.response_format
    if use.is_enforced:
        # One call of the named function; as many of any as the client takes.
        several = use.is_parallel and use.named is None
        rules = ["body: calls", call_rules(tools, use.callable, is_parallel=several)]
    elif answer is None:
        return chosen_call_rules(tools, use.shown, is_parallel=use.is_parallel, may_think=may_think)
    else:
        rules = ["body: document | calls" if use.shown else "body: document", f"document: %json {answer.schema}"]
        if use.shown:
            rules.append(call_rules(tools, use.shown, is_parallel=use.is_parallel))
    return "\n".join([*rules, *(["first: body"] if may_think else [])])
