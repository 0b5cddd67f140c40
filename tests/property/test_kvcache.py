"""Random lives of blocks against a simple model; spans cut between block sizes; the span ledger against a set."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.property.examples import examples

from disagg.core.ids import BlockId
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.block_hash import BlockHash, root_hash
from disagg.kvcache.block_pool import BlockState
from disagg.kvcache.kv_cache import Allocation, KvCache
from disagg.kvcache.segments import block_segments, span_segments
from disagg.kvcache.span_ledger import SpanLedger
from disagg.testing.engine import kv_bytes
from disagg.testing.memory import BytesMemory

SIZE = 2
ROOT = root_hash("m", "exact")
# Few different tokens and short prompts, so that prefixes are shared, repeated and evicted all the time.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=10).map(tuple)


class Life:
    """One sequence: what it was given, and how much of its chain it has committed."""

    def __init__(self, hashes: list[BlockHash], allocation: Allocation) -> None:
        self.hashes = hashes
        self.allocation = allocation
        self.num_committed = allocation.num_cached
        self.is_reserved = allocation.num_reserved > 0


class CacheMachine(RuleBasedStateMachine):
    """The model: who uses which block, and what was written into each block (its chain's hash)."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.cache = KvCache(num_blocks, SIZE)
        self.lives: list[Life] = []
        self.quarantined: list[Life] = []
        self.contents: dict[BlockId, BlockHash] = {}

    def admit(self, prompt: tuple[int, ...], num_answer: int, num_spare: int, *, reserves: bool) -> None:
        hashes = self.cache.append_hashes([], prompt, ROOT)
        num_tokens = len(prompt) + num_answer
        num_match = self.cache.num_matching_tokens(hashes, len(prompt))
        pool = self.cache.pool
        before = [(pool.state(BlockId(b)), pool.refcount(BlockId(b))) for b in range(self.num_blocks)]
        num_cached_before = pool.count(BlockState.CACHED)
        num_evicted_before = self.cache.num_evicted
        if reserves:
            has_room = self.cache.can_reserve(hashes, len(prompt), num_tokens, num_spare)
            allocation = self.cache.try_reserve(hashes, len(prompt), num_tokens, num_spare)
            assert has_room == (allocation is not None)
        else:
            allocation = self.cache.try_allocate(hashes, len(prompt) - 1, num_tokens, num_spare)
            num_match = min(num_match, (len(prompt) - 1) // SIZE * SIZE)
        if allocation is None:
            after = [(pool.state(BlockId(b)), pool.refcount(BlockId(b))) for b in range(self.num_blocks)]
            assert after == before, "a refusal changed the pool"
            self.check_refusal(hashes, num_match, num_tokens, num_spare)
            return
        assert self.cache.num_available >= num_spare, "took what was to be spared"
        assert allocation.num_cached * SIZE == num_match
        assert len(allocation.blocks) == -(-num_tokens // SIZE)
        assert len(set(allocation.blocks)) == len(allocation.blocks)
        for index in range(allocation.num_cached):
            assert self.contents[allocation.blocks[index]] == hashes[index], "a match with other contents"
        fresh = allocation.blocks[allocation.num_cached :]
        for block in fresh:
            assert before[block][0] in (BlockState.FREE, BlockState.CACHED), "somebody else's block"
            self.contents.pop(block, None)
        num_evicted = self.cache.num_evicted - num_evicted_before
        num_free_before = [state for state, _ in before].count(BlockState.FREE)
        assert num_evicted == max(0, len(fresh) - num_free_before), "evicted more than was needed"
        assert num_evicted <= num_cached_before
        self.lives.append(Life(hashes, allocation))

    def check_refusal(self, hashes: list[BlockHash], num_match: int, num_tokens: int, num_spare: int) -> None:
        """Only when the blocks nobody holds, without those it would share, are really too few."""
        pool = self.cache.pool
        unused = {BlockId(b) for b in range(self.num_blocks)} - self.users().keys()
        unused -= pool.blocks_in(BlockState.RESERVED) | pool.blocks_in(BlockState.QUARANTINED)
        shared = {
            block
            for index in range(num_match // SIZE)
            for block, block_hash in self.contents.items()
            if block_hash == hashes[index] and block in unused and block in self.cache._index
        }
        assert -(-num_tokens // SIZE) - num_match // SIZE + num_spare > len(unused) - len(shared)

    def users(self) -> dict[BlockId, int]:
        counts: dict[BlockId, int] = {}
        held: list[BlockId] = []
        for life in self.lives:
            whole = life.allocation
            held += whole.cached + whole.empty if life.is_reserved else whole.blocks
        for life in self.quarantined:
            held += life.allocation.cached
        for block in held:
            counts[block] = counts.get(block, 0) + 1
        return counts

    @rule(prompt=PROMPTS, num_answer=st.integers(0, 4), num_spare=st.integers(0, 2))
    def allocate(self, prompt: tuple[int, ...], num_answer: int, num_spare: int) -> None:
        self.admit(prompt, num_answer, num_spare, reserves=False)

    @rule(prompt=PROMPTS, num_answer=st.integers(0, 4), num_spare=st.integers(0, 2))
    def reserve(self, prompt: tuple[int, ...], num_answer: int, num_spare: int) -> None:
        self.admit(prompt, num_answer, num_spare, reserves=True)

    @precondition(lambda self: any(life.is_reserved for life in self.lives))
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from([life for life in self.lives if life.is_reserved]))
        self.cache.confirm(life.allocation)
        life.is_reserved = False

    @precondition(lambda self: any(life.is_reserved for life in self.lives))
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from([life for life in self.lives if life.is_reserved]))
        self.cache.quarantine(life.allocation)
        self.lives.remove(life)
        self.quarantined.append(life)

    @precondition(lambda self: bool(self.quarantined))
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        """Some of what the peer was to write had arrived whole and verified: that stays."""
        life = self.quarantined.pop(0)
        num_written = data.draw(st.integers(0, len(life.hashes)))
        for index in range(life.allocation.num_cached, num_written):
            self.contents[life.allocation.blocks[index]] = life.hashes[index]
        self.cache.end_quarantine(life.allocation, life.hashes, num_written)
        num_kept = max(num_written, life.allocation.num_cached)
        self.check_found(life, life.allocation.num_cached, num_kept)
        given_up = life.allocation.reserved[num_kept - life.allocation.num_cached :]
        assert {self.cache.pool.state(block) for block in given_up} <= {BlockState.FREE}, "kept what had not arrived"

    @precondition(lambda self: any(not life.is_reserved for life in self.lives))
    @rule(data=st.data(), num_blocks=st.integers(0, 5))
    def commit(self, data: st.DataObject, num_blocks: int) -> None:
        """Some more blocks of a chain are full."""
        life = data.draw(st.sampled_from([life for life in self.lives if not life.is_reserved]))
        first, stop = life.num_committed, min(len(life.hashes), life.num_committed + num_blocks)
        for index in range(first, stop):
            self.contents[life.allocation.blocks[index]] = life.hashes[index]
        self.cache.commit(life.hashes[:stop], life.allocation.blocks, life.num_committed)
        life.num_committed = max(stop, life.num_committed)
        self.check_found(life, first, stop)

    def check_found(self, life: Life, first: int, stop: int) -> None:
        """Blocks [first, stop) have just been committed."""
        own = [block in self.cache._index for block in life.allocation.blocks[:stop]]
        num_found = own.index(False) if False in own else stop
        if first <= num_found < stop:  # it stayed private because another holds the same prefix: that one is found
            num_found += 1
        assert self.cache.num_matching_tokens(life.hashes, stop * SIZE) >= num_found * SIZE, "committed and not found"

    @precondition(lambda self: any(not life.is_reserved for life in self.lives))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from([life for life in self.lives if not life.is_reserved]))
        self.cache.release(life.allocation.blocks)
        self.lives.remove(life)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        users = self.users()
        pool = self.cache.pool
        assert pool.refcounts() == [users.get(BlockId(block), 0) for block in range(self.num_blocks)]
        reserved = [block for life in self.lives if life.is_reserved for block in life.allocation.reserved]
        assert pool.blocks_in(BlockState.RESERVED) == set(reserved)
        assert len(set(reserved)) == len(reserved), "two peers may write into one block"
        apart = [block for life in self.quarantined for block in life.allocation.reserved]
        assert pool.blocks_in(BlockState.QUARANTINED) == set(apart)
        assert sum(pool.count(state) for state in BlockState) == self.num_blocks

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for life in list(self.lives):
            (self.cache.quarantine if life.is_reserved else lambda a: self.cache.release(a.blocks))(life.allocation)
            if life.is_reserved:
                self.quarantined.append(life)
        for life in self.quarantined:
            self.cache.end_quarantine(life.allocation, life.hashes, 0)
        assert self.cache.num_available == self.num_blocks
        # All of it can be evicted again: no cached block is stuck behind a child.
        assert self.cache.try_allocate([], 0, self.num_blocks * SIZE) is not None
        self.cache.check_invariants()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


def layout(block_size: int) -> KvLayout:
    return KvLayout(num_layers=3, num_kv_heads=2, head_dim=1, dtype="float16", block_size=block_size)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[KvLayout, list[BlockId], KvLayout, list[BlockId], Span]:
    """Two arenas of different block sizes, shuffled block tables, and a span of odd ends."""
    num_tokens = draw(st.integers(1, 45))
    ends = []
    for _ in range(2):
        size = draw(st.sampled_from([4, 8, 16]))
        table = draw(st.permutations(range(NUM_BLOCKS[size])))
        ends.append((layout(size), [BlockId(block) for block in table[: -(-num_tokens // size)]]))
    start = draw(st.integers(0, num_tokens - 1))
    stop = draw(st.integers(start + 1, num_tokens))
    first = draw(st.integers(0, 2))
    last = draw(st.integers(first + 1, 3))
    return *ends[0], *ends[1], Span(start, stop, first, last)


NUM_BLOCKS = {4: 14, 8: 8, 16: 4}


def address(where: KvLayout, blocks: list[BlockId], token: int, layer: int, kv: int) -> int:
    """Where one token's keys or values lie, said once more in the plainest way."""
    block, within = blocks[token // where.block_size], token % where.block_size
    plane = (2 * layer + kv) * NUM_BLOCKS[where.block_size] * where.block_size
    return (plane + block * where.block_size + within) * where.token_bytes


@settings(max_examples=examples(150))
@given(cut=cuts())
def test_copying_through_segments_moves_exactly_the_span(
    cut: tuple[KvLayout, list[BlockId], KvLayout, list[BlockId], Span],
) -> None:
    one, one_blocks, other, other_blocks, span = cut
    source = bytearray(one.arena_bytes(NUM_BLOCKS[one.block_size]))
    target = bytearray(b"\xee" * other.arena_bytes(NUM_BLOCKS[other.block_size]))
    expected = bytearray(target)
    for token in range(len(one_blocks) * one.block_size):
        for plane in range(2 * one.num_layers):
            payload = kv_bytes(one, token, token, *divmod(plane, 2))
            at = address(one, one_blocks, token, *divmod(plane, 2))
            source[at : at + len(payload)] = payload
            if span.token_start <= token < span.token_stop and span.layer_start <= plane // 2 < span.layer_stop:
                at = address(other, other_blocks, token, *divmod(plane, 2))
                expected[at : at + len(payload)] = payload
    reading = span_segments(one, NUM_BLOCKS[one.block_size], one_blocks, span)
    writing = span_segments(other, NUM_BLOCKS[other.block_size], other_blocks, span)
    payload = BytesMemory(data=bytes(source)).read(reading)
    assert len(payload) == one.span_bytes(span) == other.span_bytes(span)
    arena = BytesMemory(data=bytes(target), is_staged=True)
    landing, offset = arena.landing(writing), 0
    for buffer in landing.buffers:
        buffer[:] = payload[offset : offset + len(buffer)]
        offset += len(buffer)
    landing.commit()
    assert b"".join(arena.gather([writing[0]._replace(offset=0, length=arena.num_bytes)])) == bytes(expected)


@settings(max_examples=examples(100))
@given(cut=cuts())
def test_a_span_lies_inside_its_blocks_and_its_runs_neither_touch_nor_overlap_in_a_plane(
    cut: tuple[KvLayout, list[BlockId], KvLayout, list[BlockId], Span],
) -> None:
    where, blocks, *_, span = cut
    inside: set[int] = set()
    for segment in block_segments(where, NUM_BLOCKS[where.block_size], blocks):
        inside.update(range(segment.offset, segment.offset + segment.length))
    seen: set[int] = set()
    for segment in span_segments(where, NUM_BLOCKS[where.block_size], blocks, span):
        run = set(range(segment.offset, segment.offset + segment.length))
        assert run
        assert run <= inside
        assert not run & seen
        seen |= run
    assert len(seen) == where.span_bytes(span)


SPANS = st.builds(Span, st.integers(0, 30), st.integers(0, 30), st.integers(0, 4), st.integers(0, 4))


@settings(max_examples=examples(200))
@given(start=st.integers(0, 10), num_tokens=st.integers(0, 15), num_layers=st.integers(1, 4), spans=st.lists(SPANS))
def test_the_ledger_agrees_with_a_set(start: int, num_tokens: int, num_layers: int, spans: list[Span]) -> None:
    wanted = Span(start, start + num_tokens, 0, num_layers)
    ledger = SpanLedger(wanted)
    arrived: set[tuple[int, int]] = set()
    for span in [*spans, *spans[:2]]:
        ledger.add(span)
        ledger.check_invariants()
        for layer in range(span.layer_start, span.layer_stop):
            arrived.update((token, layer) for token in range(span.token_start, span.token_stop))
        until = wanted.token_start
        while all((until, layer) in arrived for layer in range(num_layers)):
            until += 1
        # What lies past the wanted range is nobody's business.
        assert min(ledger.complete_until(), wanted.token_stop) == min(until, wanted.token_stop)
        is_complete = all(
            (token, layer) in arrived
            for token in range(wanted.token_start, wanted.token_stop)
            for layer in range(num_layers)
        )
        assert ledger.is_complete == is_complete


GROUPED = st.builds(
    Span,
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(-1, 4),
    st.integers(0, 5),
    st.integers(0, 6),
    st.integers(0, 8),
)


@settings(max_examples=examples(200))
@given(num_layers=st.integers(1, 4), group_heads=st.sampled_from([1, 2, 3, 6]), spans=st.lists(GROUPED, max_size=20))
def test_the_ledger_of_groups_of_heads_agrees_with_a_set(num_layers: int, group_heads: int, spans: list[Span]) -> None:
    """A part of a group counts for nothing; layers and groups may have any ranges of their own."""
    wanted = Span(0, 10, 0, num_layers, 0, 6)
    ledger = SpanLedger(wanted, group_heads)
    groups = [range(start, start + group_heads) for start in range(0, 6, group_heads)]
    arrived: set[tuple[int, int, int]] = set()
    for span in spans:
        ledger.add(span)
        ledger.check_invariants()
        for index, group in enumerate(groups):
            if span.head_start <= group.start and group.stop <= span.head_stop:
                layers = range(max(0, span.layer_start), span.layer_stop)
                tokens = range(span.token_start, span.token_stop)
                arrived.update((token, layer, index) for token in tokens for layer in layers)
        until = 0
        while all((until, layer, index) in arrived for layer in range(num_layers) for index in range(len(groups))):
            until += 1
        assert min(ledger.complete_until(), 10) == min(until, 10)
