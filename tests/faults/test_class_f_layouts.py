"""Class F: workers whose KV is laid out in different ways give the right answer or never pair.

| case | what the class means here | where it is shown |
|---|---|---|
| F1, F2 | heads over 1, 2 and 4 ranks on either side, equal or not | virtual time, TCP |
| F3 | block sizes 8 to 64, three orders of dimensions | virtual time, TCP |
| F4 | the same with 128 at once | virtual time, TCP |
| F5 | windows, of some layers or all: the context is cut to the window, the layout is every model's | tests/parity |
| - | layers that keep something else than KV (hybrid models): refused by kind before a worker starts | tests/parity |
| F6 | no hang: every wait here has a deadline, and nothing is left behind | everywhere |
| F7 | layers over 1 and 2 ranks | virtual time, TCP |
| - | latent KV: one plane, with its like only | virtual time, TCP, pairing |
| - | what cannot be paired is refused when they meet, with both values | pairing |

The fake engine's answer is a hash over all KV that it reads: a row in the wrong place is a wrong answer.
"""

import asyncio
import itertools
import random

import msgspec
import pytest
import torch
from tests.faults.outputs import check_only_between_rounds, counted, prompt_kv, reserved
from tests.faults.unlike import HEAD_DIM, NUM_HEADS, NUM_LAYERS, UnlikeSite, unlike, unlike_site
from tests.unit.protocol.test_pairing import card
from tests.unit.transport.relays import Relay
from tests.unit.worker.rigs import meet, sequence_id, site

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.formats import KvWire
from disagg.core.ids import SequenceId
from disagg.core.request import SamplingParams
from disagg.core.roles import HandoffMode, Role, Task
from disagg.core.spans import SCALE_BYTES, KvLayout, KvOrder, Span
from disagg.dispatch.stream import GenerateRequest
from disagg.engine.span_conversion import decode_rows, encode_rows
from disagg.protocol.pairing import pairing_failure
from disagg.telemetry import metrics as table
from disagg.testing.engine import expected_tokens
from disagg.testing.virtual import MODEL, VirtualCluster

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
RANKS = list(itertools.product((1, 2, 4), (1, 2)))  # head shards, layer shards
KINDS = ("grouped heads", "latent")


def drawn(rng: random.Random, ranks: tuple[int, int], kind: str) -> KvLayout:
    heads, layers = (1, ranks[1]) if kind == "latent" else ranks
    order = rng.choice(list(KvOrder))
    return unlike(rng.choice([8, 16, 32, 64]), order, heads, layers, is_latent=kind == "latent")


# --- virtual time: the whole matrix ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decode_ranks", RANKS)
@pytest.mark.parametrize("prefill_ranks", RANKS)
def test_f_any_two_layouts_give_the_answer_of_one(
    prefill_ranks: tuple[int, int], decode_ranks: tuple[int, int], kind: str
) -> None:
    """Block sizes and orders are drawn, the same ones in every run."""
    rng = random.Random(f"{prefill_ranks} {decode_ranks} {kind}")
    layouts = drawn(rng, prefill_ranks, kind), drawn(rng, decode_ranks, kind)
    cluster = VirtualCluster(rng.randrange(100))
    mode = rng.choice(list(HandoffMode))
    cluster.start_worker("prefill-0", Role.PREFILL, layout=layouts[0], num_blocks=40, mode=mode)
    decode = cluster.start_worker("decode-0", Role.DECODE, layout=layouts[1], num_blocks=40)
    cluster.time.run(until=lambda: cluster.is_ready)
    lengths = (1, 8, 17, 64, 40)
    for length in lengths:
        cluster.submit(GenerateRequest(MODEL, tuple(range(length)), GREEDY))
    cluster.time.run(until=lambda: cluster.are_all_over)
    check_answers(cluster, layouts[1])
    assert counted(decode, table.HANDOFFS, "received") == len(lengths)
    assert counted(decode, table.PROMPT_TOKENS_COMPUTED) == 0
    cluster.check_nothing_left()


@pytest.mark.parametrize("pair", [((2, 2), (4, 1)), ((1, 1), (2, 1)), ((4, 1), (1, 2))])
def test_f4_128_at_once_between_unlike_layouts(pair: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Pools too small for all of them, so that reservations are refused and blocks evicted meanwhile."""
    rng = random.Random(4)
    layouts = [drawn(rng, ranks, "grouped heads") for ranks in pair]
    cluster = VirtualCluster(4)
    cluster.start_worker("prefill-0", Role.PREFILL, layout=layouts[0], num_blocks=30)
    decode = cluster.start_worker("decode-0", Role.DECODE, layout=layouts[1], num_blocks=30)
    cluster.time.run(until=lambda: cluster.is_ready)
    check_only_between_rounds(cluster)
    for _ in range(128):
        prompt = tuple(rng.randrange(900) for _ in range(rng.randint(1, 40)))
        cluster.submit(GenerateRequest(MODEL, prompt, GREEDY))
    cluster.time.run(until=lambda: cluster.are_all_over)
    check_answers(cluster, layouts[1])
    assert counted(decode, table.HANDOFFS, "received") >= 128
    cluster.check_nothing_left()


def check_answers(cluster: VirtualCluster, layout: KvLayout) -> None:
    for request_id, answer in cluster.answers.items():
        expected = expected_tokens(layout, SequenceId(request_id, 0), answer.request.prompt_ids, GREEDY)
        assert (answer.error, answer.tokens[0]) == (None, expected), cluster.time.story()


# --- TCP: what is really planned, turned and sent ----------------------------------------------------------------

PAIRS: dict[str, tuple[KvLayout, KvLayout]] = {
    "heads 1 to 2": (unlike(8), unlike(4, heads=2)),
    "heads 2 to 1": (unlike(8, heads=2), unlike(16)),
    "heads 4 to 2": (unlike(4, heads=4), unlike(8, heads=2)),
    "heads 2 to 4": (unlike(16, heads=2), unlike(8, heads=4)),
    "layers 1 to 2": (unlike(8), unlike(4, layers=2)),
    "layers 2 to 1": (unlike(8, layers=2), unlike(8)),
    "heads 2 to layers 2": (unlike(8, heads=2), unlike(16, layers=2)),
    "planes to blocks": (unlike(8), unlike(16, KvOrder.BLOCKS)),
    "blocks to planes": (unlike(8, KvOrder.BLOCKS), unlike(4)),
    "planes to heads": (unlike(8), unlike(16, KvOrder.HEADS)),
    "heads to planes": (unlike(16, KvOrder.HEADS), unlike(4)),
    "heads first, 2 to 4": (unlike(8, KvOrder.HEADS, heads=2), unlike(8, KvOrder.BLOCKS, heads=4)),
    "heads first, 4 to 1": (unlike(32, KvOrder.HEADS, heads=4, layers=2), unlike(64, KvOrder.HEADS)),
    "latent": (unlike(8, is_latent=True, layers=2), unlike(32, KvOrder.BLOCKS, is_latent=True)),
}


@pytest.mark.parametrize("name", PAIRS)
async def test_f_over_tcp_kv_is_bit_equal_and_nothing_is_left(name: str) -> None:
    """A prompt of three chunks, then others that share its beginning; over as many connections as there are ranks."""
    source, target = PAIRS[name]
    async with unlike_site("p", Role.PREFILL, source) as prefill, unlike_site("d", Role.DECODE, target) as decode:
        await meet(prefill, decode)
        assert len(decode.peers.card.data_endpoints) == target.num_ranks
        prompt = tuple(range(45))
        start(prefill, decode, 0, prompt)
        blocks = await reserved(decode, 0)
        await decode.until(lambda: decode.has_answered(0) or bool(decode.failures))
        assert decode.failures == []
        assert decode.engine.read(blocks, Span(0, 45, 0, NUM_LAYERS)) == prompt_kv(target, prompt)
        for number, length in enumerate((1, 17, 45, 60), start=1):
            start(prefill, decode, number, tuple(range(length)))
            await decode.until(lambda now=number: decode.has_answered(now))  # type: ignore[misc]
            check_tokens(decode, number, tuple(range(length)))
        await both_settled(prefill, decode)
        row_bytes = target.num_planes * target.num_layers * target.token_bytes
        assert counted(prefill, table.HANDOFF_BYTES) == counted(decode, table.PROMPT_TOKENS_RECEIVED) * row_bytes
        assert counted(decode, table.PROMPT_TOKENS_COMPUTED) == 0
        assert counted(prefill, table.PUSH_RETRIES) == 0


@pytest.mark.parametrize("name", ["heads first, 2 to 4", "heads 4 to 2"])
async def test_f4_over_tcp_128_at_once(name: str) -> None:
    source, target = PAIRS[name]
    async with unlike_site("p", Role.PREFILL, source) as prefill, unlike_site("d", Role.DECODE, target) as decode:
        await meet(prefill, decode)
        prompts = {
            number: tuple((7 * number + index) % 900 for index in range(5 + number % 23)) for number in range(128)
        }
        for number, prompt in prompts.items():
            start(prefill, decode, number, prompt)
        await decode.until(lambda: all(decode.has_answered(number) for number in prompts) or bool(decode.failures))
        assert decode.failures == prefill.failures == []
        for number, prompt in prompts.items():
            check_tokens(decode, number, prompt)
        await both_settled(prefill, decode)


async def test_f_a_worker_whose_memory_cannot_turn_spans_says_so_and_nothing_is_decoded() -> None:
    """Not guessed, not hung: the push fails with its reason."""
    kv = unlike(8, KvOrder.HEADS)
    async with site("p", Role.PREFILL, kv=kv) as prefill, site("d", Role.DECODE, kv=unlike(8)) as decode:
        await meet(prefill, decode)
        decode.start(0, Task.DECODE, prefill, tuple(range(20)), GREEDY)
        prefill.start(0, Task.PREFILL, decode, tuple(range(20)), GREEDY)
        await prefill.until(lambda: bool(prefill.failures))
        assert "cannot be turned" in prefill.failures[0].failure.message
        await decode.until(lambda: bool(decode.failures))
        assert decode.tokens(0) == []
        await prefill.settled()
        await decode.settled()


async def test_f_a_turned_push_that_arrives_damaged_at_one_rank_is_sent_again_to_all_and_counted() -> None:
    """Ranks whose part had landed take it as a repeat; nothing is decoded before all parts are right."""
    source, target = unlike(8, KvOrder.HEADS, heads=2), unlike(4, heads=4)
    prompt = tuple(range(45))
    async with unlike_site("p", Role.PREFILL, source) as prefill, unlike_site("d", Role.DECODE, target) as decode:
        ends = list(decode.peers.card.data_endpoints)
        relay = Relay(ends[2].address)
        ends[2] = Endpoint(TransportKind.TCP, relay.address, rank=2)
        decode.peers.card = msgspec.structs.replace(decode.peers.card, data_endpoints=tuple(ends))
        try:
            await meet(prefill, decode)
            start(prefill, decode, 0, (1, 2, 3))  # says hello
            await decode.until(lambda: decode.has_answered(0))
            relay.flip_ahead(200)  # a header is shorter, the parts of a push are longer
            start(prefill, decode, 1, prompt)
            await decode.until(lambda: decode.has_answered(1) or bool(decode.failures))
            assert decode.failures == prefill.failures == []
            check_tokens(decode, 1, prompt)
            assert counted(prefill, table.PUSH_RETRIES) == counted(decode, table.LANDINGS_REJECTED) == 1
            await both_settled(prefill, decode)
        finally:
            await asyncio.to_thread(relay.close)


async def test_f_a_compressed_wire_lands_decoded_between_unlike_ranks() -> None:
    """float16 on two ranks to float32 on one: what is kept is what each row's code says."""
    source = unlike(8, KvOrder.HEADS, heads=2, dtype="float16")
    async with (
        unlike_site("p", Role.PREFILL, source, wire=KvWire.INT8) as prefill,
        unlike_site("d", Role.DECODE, unlike(16), wire=KvWire.INT8) as decode,
    ):
        await meet(prefill, decode)
        start(prefill, decode, 0, tuple(range(30)))
        blocks = await reserved(decode, 0)
        (sequence,) = prefill.worker.scheduler._state.sequences.values()
        sent_from = sequence.blocks
        await decode.until(lambda: decode.has_answered(0) or bool(decode.failures))
        assert decode.failures == prefill.failures == []
        span = Span(0, 30, 0, NUM_LAYERS)
        rows = torch.frombuffer(bytearray(prefill.engine.read(sent_from, span)), dtype=torch.float16)
        expected = decode_rows(encode_rows(rows.view(-1, HEAD_DIM)), torch.float32)
        found = torch.frombuffer(bytearray(decode.engine.read(blocks, span)), dtype=torch.float32)
        # The fake engine's bytes are any numbers, or none.
        torch.testing.assert_close(found, expected.flatten(), rtol=0, atol=0, equal_nan=True)
        assert found.isfinite().double().mean() > 0.9
        assert counted(prefill, table.HANDOFF_BYTES) == NUM_LAYERS * 2 * 30 * NUM_HEADS * (HEAD_DIM + SCALE_BYTES)
        await both_settled(prefill, decode)


async def test_f_an_abort_in_the_middle_of_many_ranks_leaves_nothing_at_either_end() -> None:
    """Every rank's grant is fenced and every rank's write has ended before a block is used again."""
    source, target = unlike(4, KvOrder.HEADS, heads=4), unlike(8, heads=2)
    async with unlike_site("p", Role.PREFILL, source) as prefill, unlike_site("d", Role.DECODE, target) as decode:
        await meet(prefill, decode)
        rng = random.Random(2)
        for number in range(40):
            prompt = tuple((number + index) % 900 for index in range(50))
            start(prefill, decode, number, prompt)
            await reserved(decode, number)
            await asyncio.sleep(rng.choice([0.0, 0.001, 0.004]))
            if rng.random() < 0.5:
                (prefill if rng.random() < 0.5 else decode).abort(number)
            else:
                await decode.until(lambda now=number: decode.has_answered(now))  # type: ignore[misc]
                check_tokens(decode, number, prompt)
        await both_settled(prefill, decode)


def start(prefill: UnlikeSite, decode: UnlikeSite, number: int, prompt: tuple[int, ...]) -> None:
    decode.start(number, Task.DECODE, prefill, prompt, GREEDY)
    prefill.start(number, Task.PREFILL, decode, prompt, GREEDY)


def check_tokens(decode: UnlikeSite, number: int, prompt: tuple[int, ...]) -> None:
    found = [token.token_id for token in decode.tokens(number)]
    assert found == expected_tokens(decode.engine.layout, sequence_id(number), prompt, GREEDY)


async def both_settled(prefill: UnlikeSite, decode: UnlikeSite) -> None:
    await prefill.settled()
    await decode.settled()
    assert prefill.num_reads == decode.num_reads == 0


# --- pairing: what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_shards": 3}, "4 kv heads cannot be kept by 3 shards"),
        ({"layer_shards": 8}, "4 layers cannot be kept by 8 shards"),
        ({"head_shards": 0}, "0 shards"),
        ({"order": "token,kv,layer,block,head,dim"}, "token,kv,layer,block,head,dim is not layer,kv,block"),
        ({"is_latent": True}, "not 4 kv heads"),
        ({"is_latent": True, "num_kv_heads": 1}, "number of kv heads 1 is not 4"),
        ({"head_dim": 3}, "head dim 3 is not 2"),
        ({"dtype": "float8"}, "float8"),
    ],
)
def test_f_what_cannot_be_moved_is_refused_when_they_meet(changes: dict[str, object], said: str) -> None:
    one = msgspec.structs.replace(card("p"), layout=msgspec.structs.replace(unlike(8), **changes))
    other = msgspec.structs.replace(card("d", Role.DECODE), layout=unlike(16))
    failure = pairing_failure(one, other)
    assert failure is not None
    assert said in failure.message
    assert pairing_failure(other, one) is not None


def test_f_a_worker_that_does_not_listen_at_every_rank_is_refused() -> None:
    one = msgspec.structs.replace(card("p"), layout=unlike(8))
    ends = tuple(Endpoint(TransportKind.TCP, "127.0.0.1:9", rank=rank) for rank in range(2))
    other = msgspec.structs.replace(card("d", Role.DECODE, ends), layout=unlike(16, heads=4))
    failure = pairing_failure(one, other)
    assert failure is not None
    assert "tcp at 2 of 4 ranks" in failure.message
    whole = tuple(Endpoint(TransportKind.TCP, "127.0.0.1:9", rank=rank) for rank in range(4))
    assert pairing_failure(one, msgspec.structs.replace(other, data_endpoints=whole)) is None
    assert one.layout.row_bytes == HEAD_DIM * 4
    assert one.layout.num_kv_heads == NUM_HEADS
