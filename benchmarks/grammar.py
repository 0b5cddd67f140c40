"""What an answer by a grammar costs those beside it: step times of a batch, and the library's own times.

usage: python benchmarks/grammar.py [--quick] [--model MODEL] [--num-threads N]

The real model on this machine, no process and no socket around it. Eight plain streams decode; beside them runs nobody,
a ninth plain stream, or one that writes a document. The three take turns step by step, so that they share the noise.
  steps    median step time of each, and their ratios
  library  CPU time to compile a schema, and to find the allowed tokens at each token of a document
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import harness
from disagg.core.grammar import GrammarKind, GrammarSpec
from disagg.core.ids import BlockId, Incarnation, RequestId, SequenceId, StepId
from disagg.core.request import SamplingParams
from disagg.engine.runner import TorchEngine
from disagg.modelfiles.fetch import resolve_model
from disagg.modelfiles.grammar import GrammarCompiler, schema_text
from disagg.modelfiles.tokenizer import ModelTokenizer, load_tokenizer
from disagg.scheduler.engine import StepPlan, StepRow, TokenHistory

NUM_PLAIN, BLOCK, BLOCKS_EACH = 8, 16, 64
TARGET = 1.10  # most that a document may cost over a plain stream
CONTACT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]{1,20}@[a-z]{1,20}\\.com$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 200}, "minItems": 20, "maxItems": 20},
    },
    "required": ["name", "age", "email", "tags", "notes"],
    "additionalProperties": False,
}
DOCUMENT = {
    "name": "Jürgen O'Neil 🙂 of a long name",
    "age": 42,
    "email": "bob@example.com",
    "tags": ["red", "blue"],
    "notes": [f'note {number}: something or other, "quoted", and more of it' for number in range(20)],
}
GRAMMAR = GrammarSpec(GrammarKind.JSON_SCHEMA, schema_text(CONTACT, is_lenient=False))


class Stream:
    """One sequence that decodes; a document that is whole is begun again."""

    def __init__(self, number: int, sampling: SamplingParams, prompt: tuple[int, ...]) -> None:
        self._number = number
        self._sampling = sampling
        self._prompt = prompt
        self._attempt = 0
        self.answer: list[int] = []
        self._blocks = tuple(BlockId(number * BLOCKS_EACH + index) for index in range(BLOCKS_EACH))

    @property
    def name(self) -> SequenceId:
        return SequenceId(RequestId(Incarnation(1), self._number), 0)

    def row(self) -> StepRow:
        if self.answer and self.answer[-1] in self._sampling.stop_token_ids:
            self.answer, self._attempt = [], self._attempt + 1
        token_ids = (self.answer[-1],) if self.answer else self._prompt
        position = len(self._prompt) + len(self.answer) - 1 if self.answer else 0
        needs = self._sampling.needs_history
        history = TokenHistory(self._attempt, self._prompt, tuple(self.answer)) if needs else None
        return StepRow(self.name, token_ids, position, self._blocks, self._sampling, len(self.answer), history)


def steps_ms(engine: TorchEngine, tokenizer: ModelTokenizer, num_rounds: int) -> dict[str, list[float]]:
    """Times of steps by who runs beside the eight, in turns. Steps that read a prompt are left out."""
    prompt = tuple(tokenizer.encode("Write a contact as JSON with name, age, email, tags and notes.\n"))
    groups: dict[str, list[Stream]] = {}
    for place, kind in enumerate(("alone", "plain", "document")):
        first = place * (NUM_PLAIN + 1)
        streams = [Stream(first + number, SamplingParams(4096, seed=number), prompt) for number in range(NUM_PLAIN)]
        grammar = GRAMMAR if kind == "document" else None
        beside = SamplingParams(4096, seed=99, grammar=grammar, stop_token_ids=tokenizer.eos_ids if grammar else ())
        groups[kind] = streams if kind == "alone" else [*streams, Stream(first + NUM_PLAIN, beside, prompt)]
    times: dict[str, list[float]] = {kind: [] for kind in groups}
    for number in range(num_rounds):
        for kind, streams in groups.items():
            rows = tuple(stream.row() for stream in streams)
            is_decoding = all(len(row.token_ids) == 1 for row in rows)
            start_s = time.perf_counter()
            tokens = engine.run_step(StepPlan(StepId(number), rows), lambda num_layers: None).tokens
            if is_decoding:
                times[kind].append(1e3 * (time.perf_counter() - start_s))
            for stream, token in zip(streams, tokens, strict=True):
                stream.answer.append(token.token_id)
    return times


def library_us(compiler: GrammarCompiler, tokenizer: ModelTokenizer, rounds: int) -> dict[str, float]:
    """CPU times, so that others on the machine do not count: of compiling, and per mask at each token of a document."""
    ids = tokenizer.encode(json.dumps(DOCUMENT, ensure_ascii=False), add_special_tokens=False)
    compiles, masks, replays = [], [], []
    for _ in range(rounds):
        start_s = time.thread_time()
        state = compiler.start(GRAMMAR)
        compiles.append(1e6 * (time.thread_time() - start_s))
        for token_id in ids:
            start_s = time.thread_time()
            state.allowed()
            masks.append(1e6 * (time.thread_time() - start_s))
            state.accept([token_id])
        fresh = compiler.start(GRAMMAR)
        start_s = time.thread_time()
        fresh.accept(ids)
        replays.append(1e6 * (time.thread_time() - start_s))
    print(f"a document of {len(ids)} tokens, {tokenizer.vocab_size} tokens in the vocabulary")
    return {
        "compile_us": statistics.median(compiles),
        "mask_p50_us": harness.percentile(masks, 50),
        "mask_p99_us": harness.percentile(masks, 99),
        "replay_us": statistics.median(replays),
    }


def main() -> None:
    parser = harness.options(__doc__, rounds=1)
    parser.add_argument("--num-threads", type=int, help="of the forward pass; else as many as torch takes")
    args = parser.parse_args()
    print(harness.heading(args))
    before = harness.cpu_use()
    path = Path(resolve_model(args.model))
    tokenizer = load_tokenizer(path)
    compiler = GrammarCompiler(tokenizer)
    figures = library_us(compiler, tokenizer, 5 if args.quick else 20)
    print(
        f"library, CPU time: compile {figures['compile_us']:.0f} µs, mask p50 {figures['mask_p50_us']:.0f} µs, "
        f"p99 {figures['mask_p99_us']:.0f} µs, replay of the document {figures['replay_us']:.0f} µs"
    )
    num_blocks = 3 * (NUM_PLAIN + 1) * BLOCKS_EACH
    threads: int | None = args.num_threads
    start = compiler.start
    engine = TorchEngine(path, num_blocks=num_blocks, block_size=BLOCK, num_threads=threads, start_grammar=start)
    times = steps_ms(engine, tokenizer, 25 if args.quick else 300)
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    for kind, value in medians.items():
        print(f"eight streams and {kind:8}: {value:7.3f} ms a step, p99 {harness.percentile(times[kind], 99):.3f} ms")
    ratio = medians["document"] / medians["plain"]
    plain, document = (medians[kind] / medians["alone"] for kind in ("plain", "document"))
    print(f"over eight alone: with a ninth plain stream {plain:.3f}, with a document {document:.3f}")
    foreign = harness.foreign_share(before, harness.cpu_use())
    harness.warn_of_others(foreign)
    print(harness.verdict("step with a document over one with a ninth plain stream", ratio, TARGET, foreign))
    rounded = {key: round(value, 1) for key, value in figures.items()}
    steps = {f"step_ms_{kind}": round(value, 3) for kind, value in medians.items()}
    harness.report_json("grammar", args, {**rounded, **steps, "document_over_plain": round(ratio, 3)})


if __name__ == "__main__":
    main()
