"""Every message survives its encoding; random bytes never do worse than a DecodeError; journals in any order."""

import contextlib
import enum
import math
import typing

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.property.examples import examples

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import Fence, HandoffId, Incarnation, RequestId, SequenceId
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec, finish_reason
from disagg.protocol.handoff import CAPABILITY_BYTES, GrantKey, decode_grant_key, make_grant_key
from disagg.protocol.journal import JournalEntry
from disagg.protocol.messages import AnswerReservation, RouterToWorker, WorkerToRouter, WorkerToWorker

UNIONS = {"worker to router": WorkerToRouter, "router to worker": RouterToWorker, "worker to worker": WorkerToWorker}
DECODERS: dict[str, msgspec.msgpack.Decoder[object]] = {
    name: msgspec.msgpack.Decoder(union) for name, union in UNIONS.items()
}
MESSAGES = [(name, kind) for name, union in UNIONS.items() for kind in typing.get_args(union)]

INTEGERS = st.integers(0, 2**62)
LEAVES: dict[object, st.SearchStrategy[object]] = {
    bool: st.booleans(),
    int: INTEGERS,
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=12),
    bytes: st.binary(max_size=12),
}


def values_of(kind: object) -> st.SearchStrategy[object]:
    """Made from the declared types alone, so that a new field is covered without a change here."""
    if kind in LEAVES:
        return LEAVES[kind]
    if hasattr(kind, "__supertype__"):
        return values_of(kind.__supertype__)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:  # a number with a bound
        return st.floats(min_value=arguments[1].ge, allow_nan=False, allow_infinity=False)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, arguments))
    if arguments:  # X | None
        return st.one_of(*(st.none() if each is type(None) else values_of(each) for each in arguments))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: values_of(hints[name]) for name in kind.__struct_fields__})
    assert isinstance(kind, enum.EnumType), kind
    return st.sampled_from([*kind.__members__.values()])


@pytest.mark.parametrize(("direction", "kind"), MESSAGES, ids=[f"{way}: {kind.__name__}" for way, kind in MESSAGES])
def test_every_message_survives_its_union(direction: str, kind: type[msgspec.Struct]) -> None:
    @settings(max_examples=examples(15), database=None)
    @given(message=values_of(kind))
    def survives(message: msgspec.Struct) -> None:
        decoded = DECODERS[direction].decode(msgspec.msgpack.encode(message))
        assert type(decoded) is kind
        assert decoded == message

    survives()


@pytest.mark.parametrize("retry_after_s", [math.nan, -1.0, -math.inf])
def test_a_wait_that_is_no_time_is_refused(retry_after_s: float) -> None:
    """A clock that was set by it would never stop to go off."""
    which, fence = HandoffId(SequenceId(RequestId(Incarnation(1), 2), 0), 1), Fence(Incarnation(3), Incarnation(4), 1)
    answer = AnswerReservation(which, fence, Failure(FailureKind.OVERLOADED, "full"), retry_after_s)
    with pytest.raises(msgspec.ValidationError, match=">= 0"):
        DECODERS["worker to worker"].decode(msgspec.msgpack.encode(answer))


@pytest.mark.parametrize("direction", UNIONS)
def test_a_message_of_another_direction_is_refused(direction: str) -> None:
    foreign = [
        kind
        for union in UNIONS.values()
        for kind in typing.get_args(union)
        if kind not in typing.get_args(UNIONS[direction])
    ]
    assert foreign
    for kind in foreign:
        tag = kind.__struct_config__.tag
        with pytest.raises(msgspec.DecodeError):
            DECODERS[direction].decode(msgspec.msgpack.encode([tag, 1, 2, 3]))


@pytest.mark.parametrize("direction", UNIONS)
@settings(max_examples=examples(300))
@given(payload=st.binary(max_size=60))
@example(payload=b"\x91" * 5000)  # deeply nested arrays
@example(payload=b"\xdd\xff\xff\xff\xff")  # an array of 4 billion elements
@example(payload=b"\xc6\xff\xff\xff\xff")
def test_random_bytes_are_no_worse_than_a_decode_error(direction: str, payload: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError, RecursionError):  # a channel takes both as the peer's fault
        DECODERS[direction].decode(payload)


@settings(max_examples=examples(300))
@given(data=st.data())
def test_a_message_with_bytes_changed_is_no_worse_than_a_decode_error(data: st.DataObject) -> None:
    direction, kind = data.draw(st.sampled_from(MESSAGES))
    payload = bytearray(msgspec.msgpack.encode(data.draw(values_of(kind))))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        DECODERS[direction].decode(cut)


@given(key=st.binary(max_size=40))
def test_a_grant_key_that_is_none_says_so(key: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        decode_grant_key(key)


def test_grant_keys_differ_by_hand_off_attempt_and_incarnation() -> None:
    sequence = SequenceId(RequestId(Incarnation(1), 2), 0)
    keys = [
        GrantKey(HandoffId(sequence, attempt), Fence(Incarnation(source), Incarnation(5), attempt))
        for attempt in (1, 2)
        for source in (3, 4)
    ]
    assert len({key.encode() for key in keys}) == 4
    assert [decode_grant_key(key.encode()) for key in keys] == keys


@settings(max_examples=examples(150))
@given(
    token_ids=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    max_tokens=st.integers(1, 12),
    stops=st.booleans(),
    data=st.data(),
)
def test_a_journal_delivers_each_position_once_and_in_order_whatever_comes(
    token_ids: list[int], max_tokens: int, stops: bool, data: st.DataObject
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(5,) if stops else ())
    sequence_id = SequenceId(RequestId(Incarnation(1), 2), 0)
    entry = JournalEntry(SequenceSpec(sequence_id, (1, 2), sampling))
    sent = [EmittedToken(sequence_id, position, token) for position, token in enumerate(token_ids)]
    repeats = data.draw(st.lists(st.sampled_from(sent), max_size=6))
    delivered: list[EmittedToken] = []
    for token in data.draw(st.permutations([*sent, *repeats])):
        delivered += entry.record(token)
        entry.check_invariants()
    expected: list[EmittedToken] = []
    for token in sent:
        expected.append(token)
        if finish_reason(sampling, token.token_id, len(expected)) is not None:
            break
    assert delivered == expected == entry.tokens
    assert entry.finish == finish_reason(sampling, expected[-1].token_id, len(expected))


@settings(max_examples=examples(150))
@given(
    token_ids=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    max_tokens=st.integers(1, 12),
    stops=st.booleans(),
    data=st.data(),
)
def test_a_journal_takes_many_tokens_as_it_takes_each(
    token_ids: list[int], max_tokens: int, stops: bool, data: st.DataObject
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(5,) if stops else ())
    sequence_id = SequenceId(RequestId(Incarnation(1), 2), 0)
    one, other = (JournalEntry(SequenceSpec(sequence_id, (1, 2), sampling)) for _ in range(2))
    sent = [EmittedToken(sequence_id, position, token) for position, token in enumerate(token_ids)]
    while sent:
        num = data.draw(st.integers(1, len(sent)))
        batch, sent = sent[:num], sent[num:]
        if data.draw(st.booleans()):
            batch = data.draw(st.permutations(batch))
        assert other.record_all(batch) == [fresh for token in batch for fresh in one.record(token)]
        assert (other.tokens, other.finish) == (one.tokens, one.finish)
        other.check_invariants()


def test_a_grant_key_cannot_be_made_without_the_seed_of_the_process_that_grants() -> None:
    handoff_id = HandoffId(SequenceId(RequestId(Incarnation(1), 2), 0), 1)
    fences = [Fence(Incarnation(3), Incarnation(5), attempt) for attempt in (1, 2)]
    keys = {(seed, fence): make_grant_key(seed, handoff_id, fence) for seed in (b"a", b"b") for fence in fences}
    capabilities = {decode_grant_key(key).capability for key in keys.values()}
    assert len(capabilities) == 4
    assert {len(capability) for capability in capabilities} == {CAPABILITY_BYTES}
    for (seed, fence), key in keys.items():
        assert (decode_grant_key(key).handoff_id, decode_grant_key(key).fence) == (handoff_id, fence)
        assert make_grant_key(seed, handoff_id, fence) == key  # a question asked again gets the same answer
        assert GrantKey(handoff_id, fence).encode() != key
