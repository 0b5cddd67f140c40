"""KV that has lost bits on its way never answers for KV that was computed; for its like it does."""

import pytest
from tests.unit.scheduler.rigs import LAYOUT, Duo, duo

from disagg.core.formats import KvWire
from disagg.core.roles import Task
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.conversion import lossy_form
from disagg.telemetry.metrics import HANDOFF_BYTES, PREFIX_TOKENS_HIT, PROMPT_TOKENS_RECEIVED

PROMPT = tuple(range(13))  # three full blocks
HAND_OFF = (Task.PREFILL, Task.DECODE)


def hand_over(pair: Duo, number: int) -> int:
    """One sequence from start to end; how many tokens of it were received."""
    before = pair.destination.scheduler.counters.get(PROMPT_TOKENS_RECEIVED)
    pair.start(number, HAND_OFF, PROMPT, max_tokens=2)
    pair.exchange()
    pair.step(pair.source)
    pair.step(pair.destination)
    assert pair.source.scheduler.is_idle
    assert pair.destination.scheduler.is_idle
    return round(pair.destination.scheduler.counters.get(PROMPT_TOKENS_RECEIVED) - before)


@pytest.mark.parametrize("wire", list(KvWire))
def test_only_native_kv_answers_a_native_lookup(wire: KvWire) -> None:
    pair = duo(wire)
    assert hand_over(pair, 0) == 13
    assert hand_over(pair, 1) == 1, "what came over this wire answers for what comes over it"
    decode = pair.destination
    decode.start(2, Task.WHOLE, PROMPT)
    decode.finish_steps()
    hits = decode.scheduler.counters.get(PREFIX_TOKENS_HIT, Task.WHOLE.value)
    assert hits == (12 if wire is KvWire.NATIVE else 0)
    decode.start(3, Task.WHOLE, PROMPT)
    decode.finish_steps()
    assert decode.scheduler.counters.get(PREFIX_TOKENS_HIT, Task.WHOLE.value) == hits + 12


def test_what_was_computed_does_not_answer_a_lossy_lookup_either() -> None:
    """It could, but then two requests of one path would differ by what somebody else has asked before."""
    pair = duo(KvWire.INT8)
    pair.destination.start(0, Task.WHOLE, PROMPT)
    pair.destination.finish_steps()
    assert hand_over(pair, 1) == 13


def test_bytes_are_counted_as_they_travel() -> None:
    pair = duo(KvWire.INT8)
    hand_over(pair, 0)
    sent = sum(pair.source.scheduler.counters.get(HANDOFF_BYTES, label) for label in ("hidden", "visible"))
    assert sent == LAYOUT.span_bytes(Span(0, 13, 0, 3), KvWire.INT8) == 3 * 2 * 13 * (2 + 4)


@pytest.mark.parametrize(
    ("source", "destination", "form"),
    [
        ("float16", "float16", ""),
        ("float16", "float32", ""),
        ("bfloat16", "float32", ""),
        ("float32", "float16", "float32 as float16"),
        ("bfloat16", "float16", "bfloat16 as float16"),
        ("float16", "bfloat16", "float16 as bfloat16"),
    ],
)
def test_a_cast_loses_bits_unless_it_widens(source: str, destination: str, form: str) -> None:
    one, other = (KvLayout(3, 1, 2, dtype, 4) for dtype in (source, destination))
    assert lossy_form(one, other, KvWire.NATIVE) == form
    assert lossy_form(one, other, KvWire.INT8) == "int8"
