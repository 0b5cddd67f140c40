"""Sizes, addresses, sequence lengths, ends of answers and the error tree."""

import msgspec
import pytest

from disagg.core import errors
from disagg.core.endpoints import is_dialable, join_address, split_address
from disagg.core.ids import Fence, HandoffId, Incarnation, RequestId, SequenceId
from disagg.core.request import FinishReason, SamplingParams, SequenceSpec, finish_reason
from disagg.core.roles import ROLE_TASKS, Role, Task
from disagg.core.spans import DTYPE_BYTES, KvLayout, Span

REQUEST = RequestId(Incarnation(0xAB), 7)


def test_ids_say_where_they_come_from() -> None:
    sequence = SequenceId(REQUEST, 2)
    assert str(REQUEST) == "ab-7"
    assert str(sequence) == "ab-7.2"
    assert str(HandoffId(sequence, 3)) == "ab-7.2#3"


def test_a_fence_differs_by_either_incarnation_and_by_attempt() -> None:
    fence = Fence(Incarnation(1), Incarnation(2), 1)
    others = [
        Fence(Incarnation(3), Incarnation(2), 1),
        Fence(Incarnation(1), Incarnation(3), 1),
        Fence(Incarnation(1), Incarnation(2), 2),
    ]
    assert len({fence, *others}) == 4


@pytest.mark.parametrize(
    ("host", "port", "address"), [("10.0.0.1", 0, "10.0.0.1:0"), ("box", 8001, "box:8001"), ("::1", 80, "[::1]:80")]
)
def test_an_address_is_taken_apart_as_it_was_put_together(host: str, port: int, address: str) -> None:
    assert join_address(host, port) == address
    assert split_address(address) == (host, port)


def test_an_address_without_a_port_is_refused() -> None:
    for text in ("box", "box:", "box:http", ""):
        with pytest.raises(ValueError, match="invalid literal"):
            split_address(text)


@pytest.mark.parametrize("address", ["box:65536", "10.0.0.1:-1", "[::1]:4294967296"])
def test_a_port_that_no_socket_has_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not 0 to 65535"):
        split_address(address)
    assert not is_dialable(address)


@pytest.mark.parametrize(("address", "expected"), [("box:1", True), ("[::1]:9", True), (":9", False), ("box:0", False)])
def test_an_address_can_be_dialled_where_host_and_port_are_named(address: str, expected: bool) -> None:
    assert is_dialable(address) is expected


@pytest.mark.parametrize(("dtype", "num_bytes"), sorted(DTYPE_BYTES.items()))
def test_layout_bytes_add_up(dtype: str, num_bytes: int) -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype=dtype, block_size=8)
    assert layout.token_bytes == 2 * 5 * num_bytes
    assert layout.block_bytes == 8 * layout.token_bytes
    assert layout.arena_bytes(7) == 3 * 2 * 7 * layout.block_bytes
    assert layout.span_bytes(Span(0, 8 * 7, 0, 3)) == layout.arena_bytes(7)
    assert layout.span_bytes(Span(3, 5, 1, 2)) == 2 * 2 * layout.token_bytes


@pytest.mark.parametrize(
    ("span", "is_empty"),
    [(Span(0, 1, 0, 1), False), (Span(1, 1, 0, 1), True), (Span(0, 1, 1, 1), True), (Span(2, 1, 0, 1), True)],
)
def test_a_span_without_tokens_or_layers_is_empty(span: Span, is_empty: bool) -> None:
    assert span.is_empty is is_empty


@pytest.mark.parametrize(("max_tokens", "total"), [(0, 5), (1, 5), (2, 6), (10, 14)])
def test_the_last_token_of_an_answer_needs_no_kv(max_tokens: int, total: int) -> None:
    spec = SequenceSpec(SequenceId(REQUEST, 0), (1, 2, 3, 4, 5), SamplingParams(max_tokens))
    assert spec.max_total_tokens == total


@pytest.mark.parametrize(
    ("token", "num_tokens", "reason"),
    [
        (5, 1, None),
        (5, 3, FinishReason.LENGTH),
        (9, 1, FinishReason.STOP),
        (9, 3, FinishReason.STOP),  # a stop token in the last place is a stop, as a client would see it
    ],
)
def test_an_answer_ends_by_stop_token_or_length(token: int, num_tokens: int, reason: FinishReason | None) -> None:
    assert finish_reason(SamplingParams(max_tokens=3, stop_token_ids=(9,)), token, num_tokens) is reason


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(1, temperature=0.0).is_greedy
    assert not SamplingParams(1, temperature=0.01).is_greedy
    assert SamplingParams(1, temperature=1e-300).is_greedy  # scores over it are no numbers


@pytest.mark.parametrize(("num_tokens", "reason"), [(1, None), (2, None), (3, FinishReason.STOP)])
def test_a_stop_token_ends_nothing_before_min_tokens(num_tokens: int, reason: FinishReason | None) -> None:
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(5,), min_tokens=2)
    assert finish_reason(sampling, 5, num_tokens) is reason


def test_parameters_of_an_older_sender_are_neutral() -> None:
    """Fields are positions on the wire: new ones come last, each with the value that changes nothing."""
    old = msgspec.msgpack.encode((7, 0.5, 0.9, 3, (1, 2), None))
    read = msgspec.msgpack.decode(old, type=SamplingParams)
    assert read == SamplingParams(7, 0.5, 0.9, 3, (1, 2), None)
    assert not read.has_penalty
    full = SamplingParams(7, top_k=3, min_p=0.1, repetition_penalty=1.1, logit_bias=((4, -1.5),), min_tokens=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(full), type=SamplingParams) == full


def test_any_penalty_needs_the_tokens_so_far() -> None:
    assert SamplingParams(1, presence_penalty=0.5).has_penalty
    assert SamplingParams(1, frequency_penalty=-0.5).has_penalty
    assert SamplingParams(1, repetition_penalty=0.5).has_penalty
    assert not SamplingParams(1, top_k=3, logit_bias=((1, 1.0),), min_tokens=1).has_penalty


def test_roles_share_out_the_tasks() -> None:
    assert ROLE_TASKS.keys() == set(Role)
    assert Task.DECODE not in ROLE_TASKS[Role.PREFILL]
    assert Task.WHOLE not in ROLE_TASKS[Role.PREFILL]
    assert Task.PREFILL not in ROLE_TASKS[Role.DECODE]
    assert ROLE_TASKS[Role.MIXED] == {Task.WHOLE}


def test_the_error_tree_is_the_one_in_the_docstring() -> None:
    """Indentation in the docstring is inheritance in the code, and nothing is left out."""
    drawn: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = line.strip().split(" ")[0]
        cls = getattr(errors, name, None)
        if not line.startswith("    ") or not isinstance(cls, type):
            continue
        indent = len(line) - len(line.lstrip())
        path = [(depth, parent) for depth, parent in path if depth < indent]
        drawn[name] = path[-1][1] if path else "Exception"
        path.append((indent, name))
    defined = {
        cls.__name__: cls.__mro__[1].__name__
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, Exception)
    }
    assert drawn == defined
