"""Two workers meet: what must be equal, with both values in the message."""

import msgspec
import pytest

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import FailureKind
from disagg.core.formats import KvWire
from disagg.core.ids import Incarnation, WorkerId
from disagg.core.roles import ROLE_TASKS, Numerics, Role, Task
from disagg.core.spans import KvLayout
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.pairing import (
    HANDOFF_ROLES,
    card_flaw,
    common_kinds,
    endpoints_over,
    is_handoff_pair,
    pairing_failure,
)

replace = msgspec.structs.replace
TCP = Endpoint(TransportKind.TCP, "127.0.0.1:9")
LOCAL = Endpoint(TransportKind.IN_PROCESS, "here")


def card(name: str, role: Role = Role.PREFILL, endpoints: tuple[Endpoint, ...] = (TCP,)) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(name),
        incarnation=Incarnation(1),
        role=role,
        pool=PoolCard("model", "weights-a", "tokenizer-a", Numerics.EXACT, vocab_size=100, max_context=64),
        layout=KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4),
        num_blocks=8,
        control_address="127.0.0.1:1",
        data_endpoints=endpoints,
    )


POOL = {"model_digest": "weights-b", "tokenizer_digest": "tokenizer-b", "numerics": Numerics.BOUNDED, "vocab_size": 99}
LAYOUT = {"dtype": "float16", "num_layers": 3, "num_kv_heads": 4, "head_dim": 16, "order": "kv,layer"}


@pytest.mark.parametrize("field", [*POOL, *LAYOUT])
def test_each_difference_is_named_with_both_values(field: str) -> None:
    one = card("pre-a")
    if field in POOL:
        other = replace(card("dec-b"), pool=replace(one.pool, **{field: POOL[field]}))
        values = getattr(one.pool, field), getattr(other.pool, field)
    else:
        other = replace(card("dec-b"), layout=replace(one.layout, **{field: LAYOUT[field]}))
        values = getattr(one.layout, field), getattr(other.layout, field)
    failure = pairing_failure(one, other)
    assert failure is not None
    assert failure.kind is FailureKind.INVALID_REQUEST
    for text in ("pre-a", "dec-b", *map(str, values)):
        assert text in failure.message
    back = pairing_failure(other, one)
    assert back is not None
    assert back.message.index(str(values[1])) < back.message.rindex(str(values[0]))


def test_the_wire_is_fixed_at_pairing_and_one_that_loses_bits_needs_bounded_numerics() -> None:
    bounded = replace(card("pre-a").pool, numerics=Numerics.BOUNDED)
    one, other = (replace(card(name), pool=bounded, kv_wire=KvWire.INT8) for name in ("pre-a", "dec-b"))
    assert pairing_failure(one, other) is None
    failure = pairing_failure(one, replace(other, kv_wire=KvWire.NATIVE))
    assert failure is not None
    assert "KV wire int8 is not native" in failure.message
    exact = replace(card("pre-a"), kv_wire=KvWire.INT8)
    failure = pairing_failure(exact, exact)
    assert failure is not None
    assert "KV wire int8 loses bits, which exact numerics do not allow" in failure.message


def test_dtypes_may_differ_where_numerics_are_bounded() -> None:
    bounded = replace(card("pre-a").pool, numerics=Numerics.BOUNDED)
    one = replace(card("pre-a"), pool=bounded)
    for dtype in ("float16", "bfloat16"):
        assert pairing_failure(one, replace(one, layout=replace(one.layout, dtype=dtype))) is None


def test_unlike_arithmetic_is_refused_in_exact_numerics_only() -> None:
    """A CPU with AMX and one without: both are named, and what makes them alike."""
    one, other = card("pre-a"), card("dec-b", Role.DECODE)
    tiles, plain = "fp16, native in bf16 tiles", "fp16, native"

    def with_arithmetic(of: WorkerCard, arithmetic: str, numerics: Numerics) -> WorkerCard:
        return replace(of, pool=replace(of.pool, arithmetic=arithmetic, numerics=numerics))

    failure = pairing_failure(
        with_arithmetic(one, tiles, Numerics.EXACT), with_arithmetic(other, plain, Numerics.EXACT)
    )
    assert failure is not None
    for text in ("pre-a", "dec-b", f"{tiles} is not {plain}", "--kernels portable", "--numerics bounded"):
        assert text in failure.message
    for left, right, numerics in ((tiles, tiles, Numerics.EXACT), (tiles, plain, Numerics.BOUNDED)):
        assert pairing_failure(with_arithmetic(one, left, numerics), with_arithmetic(other, right, numerics)) is None


def test_block_size_pool_size_context_and_client_name_may_differ() -> None:
    one = card("pre-a")
    other = replace(
        card("dec-b", Role.DECODE),
        layout=replace(one.layout, block_size=16),
        num_blocks=1000,
        pool=replace(one.pool, max_context=32, model="another name"),
    )
    assert pairing_failure(one, other) is None
    assert pairing_failure(other, one) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "fits"),
    [((1, 1), (1, 1), True), ((1, 2), (2, 3), True), ((1, 3), (2, 2), True), ((1, 1), (2, 2), False)],
)
def test_protocol_ranges_must_overlap(mine: tuple[int, int], theirs: tuple[int, int], fits: bool) -> None:
    one = replace(card("pre-a"), protocol_min=mine[0], protocol_max=mine[1])
    other = replace(card("dec-b"), protocol_min=theirs[0], protocol_max=theirs[1])
    for failure in (pairing_failure(one, other), pairing_failure(other, one)):
        assert (failure is None) is fits
        if failure is not None:
            assert "1..1" in failure.message
            assert "2..2" in failure.message


def test_without_a_common_transport_both_offers_are_named() -> None:
    failure = pairing_failure(card("pre-a", endpoints=(TCP,)), card("dec-b", endpoints=(LOCAL,)))
    assert failure is not None
    assert "transports offered tcp is not in_process" in failure.message
    assert pairing_failure(card("pre-a", endpoints=()), card("dec-b", endpoints=())) is not None


def test_tasks_of_a_hand_off_are_those_of_the_two_roles_that_hand_over() -> None:
    for role, tasks in ROLE_TASKS.items():
        assert (Task.PREFILL in tasks) is any(source is role for source, _ in HANDOFF_ROLES)
        assert (Task.DECODE in tasks) is any(target is role for _, target in HANDOFF_ROLES)


@pytest.mark.parametrize("address", ["", "nowhere", ":9", "10.0.0.1:0", "10.0.0.1:70000", "10.0.0.1:http"])
def test_what_cannot_be_dialled_for_kv_is_refused_and_named(address: str) -> None:
    other = card("dec-b", Role.DECODE, (Endpoint(TransportKind.TCP, address),))
    failure = pairing_failure(card("pre-a"), other)
    assert failure is not None
    assert failure.message == f"dec-b cannot be paired: {address!r} for KV over tcp, which is no host:port"


def test_common_transports_are_written_to_at_the_destination() -> None:
    elsewhere = Endpoint(TransportKind.TCP, "127.0.0.1:10")
    source, target = card("pre-a", endpoints=(LOCAL, TCP)), card("dec-b", endpoints=(elsewhere, LOCAL))
    assert common_kinds(source, target) == (TransportKind.TCP, TransportKind.IN_PROCESS)
    assert endpoints_over(source, target, TransportKind.TCP) == (elsewhere,)
    assert endpoints_over(source, target, TransportKind.IN_PROCESS) == (LOCAL,)
    assert endpoints_over(source, target, TransportKind.SHARED_MEMORY) == ()
    assert common_kinds(card("pre-a", endpoints=(TCP,)), target) == (TransportKind.TCP,)


def test_shared_memory_is_common_within_one_domain_only() -> None:
    ours, theirs = (Endpoint(TransportKind.SHARED_MEMORY, f"{domain}/{name}") for domain, name in (("a", 1), ("a", 2)))
    foreign = Endpoint(TransportKind.SHARED_MEMORY, "b/3")
    elsewhere = Endpoint(TransportKind.TCP, "127.0.0.1:10")
    source = card("pre-a", endpoints=(TCP, ours))
    neighbour, stranger = (card("dec-b", endpoints=(elsewhere, each)) for each in (theirs, foreign))
    assert common_kinds(source, neighbour) == (TransportKind.TCP, TransportKind.SHARED_MEMORY)
    assert endpoints_over(source, neighbour, TransportKind.SHARED_MEMORY) == (theirs,)
    assert common_kinds(source, stranger) == (TransportKind.TCP,)
    assert pairing_failure(source, card("dec-b", endpoints=(foreign,))) is not None


@pytest.mark.parametrize("source", Role)
@pytest.mark.parametrize("destination", Role)
def test_prompts_are_handed_from_prefill_to_decode_only(source: Role, destination: Role) -> None:
    expected = (source, destination) == (Role.PREFILL, Role.DECODE)
    assert is_handoff_pair(card("a", source), card("b", destination)) is expected


def test_pools_of_two_models_do_not_meet() -> None:
    other = card("dec-b", Role.DECODE)
    assert not is_handoff_pair(card("pre-a"), replace(other, pool=replace(other.pool, model="another")))


FLAWS: dict[str, dict[str, object]] = {
    "layout": {"num_layers": 0, "num_kv_heads": -1, "head_dim": 0, "block_size": 0, "dtype": "float8"},
    "pool": {"max_context": 0, "vocab_size": 0},
    "card": {"num_blocks": 0},
}


@pytest.mark.parametrize(("where", "field"), [(where, field) for where, fields in FLAWS.items() for field in fields])
def test_a_card_that_nobody_can_work_with_is_told_with_the_value(where: str, field: str) -> None:
    good = card("dec-b", Role.DECODE)
    assert card_flaw(good) == ""
    value = FLAWS[where][field]
    bad = {
        "layout": lambda: replace(good, layout=replace(good.layout, **{field: value})),
        "pool": lambda: replace(good, pool=replace(good.pool, **{field: value})),
        "card": lambda: replace(good, **{field: value}),
    }[where]()
    flaw = card_flaw(bad)
    assert str(value) in flaw
    for failure in (pairing_failure(card("pre-a"), bad), pairing_failure(bad, card("pre-a"))):
        assert failure is not None
        assert failure.kind is FailureKind.INVALID_REQUEST
        assert failure.message == f"dec-b cannot be paired: {flaw}"
