"""An engine without torch whose answers depend on every byte of KV that it reads.

KV of a token in one layer is a hash of (token id, position, layer, K or V). The next token is a hash over the KV of all
earlier positions *as they lie in the arena*, so a block that was lost, swapped or overwritten changes the answer.

Its grammars are "mod N": a token may follow an answer if it leaves the same rest over N as the answer's sum plus its
length. So one that is begun anew in the middle of an answer, or misses a token, changes the answer too.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from disagg.core.errors import InternalFault, InvalidRequest
from disagg.core.grammar import GrammarSpec
from disagg.core.ids import BlockId, HandoffId, SequenceId
from disagg.core.request import EmittedToken, SamplingParams, TokenLogprobs
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.memory import Memory, Segment
from disagg.kvcache.segments import span_segments
from disagg.scheduler.engine import (
    LayerRange,
    OnLayers,
    RowScores,
    Scoring,
    StepPlan,
    StepResult,
    StepRow,
    TokenHistory,
)
from disagg.testing.memory import BytesMemory


class FakeEngine:
    """Deterministic: the same prompt, parameters and positions give the same tokens on any worker."""

    def __init__(self, layout: KvLayout, num_blocks: int, vocab_size: int = 1000) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._rank_layouts = [layout.rank_layout(rank) for rank in range(layout.num_ranks)]
        self.memories = tuple(BytesMemory(each.arena_bytes(num_blocks)) for each in self._rank_layouts)
        self.num_steps = 0

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def memory(self) -> Memory:
        """Of the first rank, which is mostly the only one."""
        return self.memories[0]

    def run_step(self, plan: StepPlan, on_layers: OnLayers) -> StepResult:
        self.num_steps += 1
        layers = plan.layers or LayerRange(0, self._layout.num_layers)
        for layer in range(layers.start, layers.stop):
            for row in plan.rows:
                self._write(row, layer)
            on_layers(layer + 1)
        if plan.layers is not None:
            return self._finish_part(plan, plan.layers)
        tokens = tuple(
            self._sample(row, row.sampling, self._seen(row, layers)) for row in plan.rows if row.sampling is not None
        )
        scores = tuple(RowScores(row.sequence_id, _scores(row.scoring)) for row in plan.rows if row.scoring is not None)
        return StepResult(plan.step_id, tokens, scores=scores)

    def _finish_part(self, plan: StepPlan, layers: LayerRange) -> StepResult:
        """What is carried from part to part is all KV that was read, as it was when its layer ran."""
        (row,) = plan.rows
        num_due = self._layout.span_bytes(Span(0, row.position + len(row.token_ids), 0, layers.start))
        if len(plan.carried) != num_due:
            raise InternalFault(f"{len(plan.carried)} bytes are carried into {layers} of {row}, {num_due} are due")
        seen = plan.carried + self._seen(row, layers)
        if layers.stop < self._layout.num_layers:
            return StepResult(plan.step_id, (), carried=seen)
        if row.sampling is None:
            raise InternalFault(f"the last part of {row} asks for no token")
        return StepResult(plan.step_id, (self._sample(row, row.sampling, seen),))

    def prepare_grammar(self, attempt_id: HandoffId, grammar: GrammarSpec, emitted_ids: tuple[int, ...]) -> None:
        """Raises InvalidRequest for any text but "mod N"."""
        _modulus(grammar)

    def _write(self, row: StepRow, layer: int) -> None:
        span = Span(row.position, row.position + len(row.token_ids), layer, layer + 1)
        payload = b"".join(
            kv_bytes(self._layout, token, row.position + index, layer, kv)
            for kv in range(self._layout.num_planes)
            for index, token in enumerate(row.token_ids)
        )
        self.write(row.block_table, span, payload)

    def _seen(self, row: StepRow, layers: LayerRange) -> bytes:
        """The KV that a row reads in these layers, as it lies there now."""
        return self.read(row.block_table, Span(0, row.position + len(row.token_ids), layers.start, layers.stop))

    def _sample(self, row: StepRow, sampling: SamplingParams, seen: bytes) -> EmittedToken:
        digest = hashlib.blake2b(seen, digest_size=16)
        if not sampling.is_greedy:
            digest.update(struct.pack("<QQQ", sampling.seed, row.sequence_id.choice, row.output_position))
        token = int.from_bytes(digest.digest()[:8]) % self._vocab_size
        if sampling.grammar is not None:
            token = self._allowed(row, sampling.grammar, token)
        logprobs = TokenLogprobs(-1.0) if sampling.num_logprobs is not None else None
        return EmittedToken(row.sequence_id, row.output_position, token, logprobs)

    def _allowed(self, row: StepRow, grammar: GrammarSpec, token: int) -> int:
        """The allowed token next to this one."""
        if row.history is None or len(row.history.answer_ids) != row.output_position:
            raise InternalFault(f"row of {row.sequence_id} has a grammar, but not the tokens of its answer")
        modulus, answer_ids = _modulus(grammar), row.history.answer_ids
        rest = (sum(answer_ids) + len(answer_ids)) % modulus
        return token - token % modulus + rest if token >= modulus else rest

    def read(self, blocks: Sequence[BlockId], span: Span) -> bytes:
        """KV bytes of a span as [layer, K/V, token, head, dim], whatever the order and ranks of the arena."""
        if self._is_plain:
            return b"".join(self.memory.gather(span_segments(self._layout, self._num_blocks, blocks, span)))
        found = np.empty(self._shape(span), np.uint8)
        for rank, layout, part, local in self._parts(span):
            views = self.memories[rank].gather(span_segments(layout, self._num_blocks, blocks, local))
            rows = np.frombuffer(b"".join(views), np.uint8)
            self._window(found, span, part)[:] = _turned(rows.reshape(_wire_shape(layout, local)), layout)
        return found.tobytes()

    def write(self, blocks: Sequence[BlockId], span: Span, payload: bytes) -> None:
        """What read() gives."""
        if len(payload) != self._layout.span_bytes(span):
            raise InternalFault(f"{len(payload)} bytes of KV for {self._layout.span_bytes(span)} bytes of arena")
        if self._is_plain:
            self._land(0, span_segments(self._layout, self._num_blocks, blocks, span), payload)
            return
        given = np.frombuffer(payload, np.uint8).reshape(self._shape(span))
        for rank, layout, part, local in self._parts(span):
            rows = _turned(self._window(given, span, part), layout).tobytes()
            self._land(rank, span_segments(layout, self._num_blocks, blocks, local), rows)

    def _land(self, rank: int, segments: Sequence[Segment], payload: bytes) -> None:
        landing, offset = self.memories[rank].landing(segments), 0
        for buffer in landing.buffers:
            buffer[:] = payload[offset : offset + len(buffer)]
            offset += len(buffer)
        landing.commit()

    @property
    def _is_plain(self) -> bool:
        """One arena whose wire order is that of read()."""
        return self._layout.num_ranks == 1 and not self._layout.is_head_major

    def _shape(self, span: Span) -> tuple[int, ...]:
        layout = self._layout
        return span.num_layers, layout.num_planes, span.num_tokens, layout.num_kv_heads, layout.row_bytes

    def _parts(self, span: Span) -> Iterator[tuple[int, KvLayout, Span, Span]]:
        """(rank, layout of its arena, what it keeps of the span, the same in its own layers and heads)."""
        for rank, layout in enumerate(self._rank_layouts):
            whole = self._layout.rank_span(rank)
            part = span.intersection(whole)
            if not part.is_empty:
                layers = part.layer_start - whole.layer_start, part.layer_stop - whole.layer_start
                yield rank, layout, part, Span(part.token_start, part.token_stop, *layers)

    def _window(self, rows: npt.NDArray[np.uint8], span: Span, part: Span) -> npt.NDArray[np.uint8]:
        layers = slice(part.layer_start - span.layer_start, part.layer_stop - span.layer_start)
        return rows[layers, :, :, part.head_start : part.head_stop]


def _wire_shape(layout: KvLayout, span: Span) -> tuple[int, ...]:
    tokens, heads = span.num_tokens, layout.num_kv_heads
    within = (heads, tokens) if layout.is_head_major else (tokens, heads)
    return span.num_layers, layout.num_planes, *within, layout.row_bytes


def _turned(rows: npt.NDArray[np.uint8], layout: KvLayout) -> npt.NDArray[np.uint8]:
    """Between token before head and the arena's own order, either way."""
    return rows.swapaxes(2, 3) if layout.is_head_major else rows


def _scores(scoring: Scoring) -> tuple[TokenLogprobs, ...]:
    """Of a token its own id says all, so that a lost or doubled one shows."""
    return tuple(TokenLogprobs(-float(token_id)) for token_id in scoring.following_ids)


def _modulus(grammar: GrammarSpec) -> int:
    word, _, number = grammar.text.partition(" ")
    if word != "mod" or not number.isdecimal() or int(number) < 1:
        raise InvalidRequest(f"{grammar.text!r} is no grammar; this engine knows 'mod N'")
    return int(number)


def kv_bytes(layout: KvLayout, token_id: int, position: int, layer: int, kv: int) -> bytes:
    """KV of one token in one layer: token_bytes long, other bytes for each head."""
    return _kv_bytes(token_id, position, layer, kv, layout.num_kv_heads, layout.row_bytes)


@lru_cache(maxsize=1 << 15)  # each is asked for again by whoever checks the answer
def _kv_bytes(token_id: int, position: int, layer: int, kv: int, num_heads: int, row_bytes: int) -> bytes:
    digest = hashlib.blake2b(struct.pack("<QQQQ", token_id, position, layer, kv), digest_size=8).digest()
    if num_heads == 1:  # most tests
        return (digest * (row_bytes // 8 + 1))[:row_bytes]
    seeds = np.frombuffer(digest, np.uint64) + np.arange(num_heads, dtype=np.uint64) * _HEAD_STEP
    rows = np.repeat(seeds[:, None], row_bytes // 8 + 1, axis=1).view(np.uint8)
    return rows[:, :row_bytes].tobytes()


_HEAD_STEP = np.uint64(0x9E3779B97F4A7C15)


def expected_tokens(
    layout: KvLayout, sequence_id: SequenceId, prompt: Sequence[int], sampling: SamplingParams, vocab_size: int = 1000
) -> list[int]:
    """What FakeEngine answers when nothing goes wrong: computed alone, in one chunk, in a fresh arena."""
    num_blocks = -(-(len(prompt) + sampling.max_tokens) // layout.block_size)
    engine = FakeEngine(layout, num_blocks, vocab_size)
    table = tuple(BlockId(block) for block in range(num_blocks))
    tokens: list[int] = []
    pending, position = tuple(prompt), 0
    while len(tokens) < sampling.max_tokens and (not tokens or tokens[-1] not in sampling.stop_token_ids):
        history = TokenHistory(0, tuple(prompt), tuple(tokens)) if sampling.needs_history else None
        row = StepRow(sequence_id, pending, position, table, sampling, len(tokens), history)
        result = engine.run_step(StepPlan(0, (row,)), lambda num_layers: None)  # type: ignore[arg-type]
        position += len(pending)
        tokens.append(result.tokens[0].token_id)
        pending = (tokens[-1],)
    return tokens
