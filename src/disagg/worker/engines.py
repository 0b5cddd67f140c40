"""The one place that loads heavy engine back ends."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from disagg.core.errors import ConfigurationError, InvalidRequest
from disagg.core.grammar import GrammarSpec
from disagg.core.roles import Numerics
from disagg.kvcache.conversion import ConvertingMemory
from disagg.kvcache.memory import Memory
from disagg.modelfiles.digest import model_digest
from disagg.modelfiles.grammar import GrammarCompiler, GrammarState
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.modelfiles.vocabulary import Vocabulary, read_vocabulary
from disagg.protocol.cards import PoolCard
from disagg.scheduler.engine import Engine
from disagg.worker.config import WorkerConfig

_log = logging.getLogger(__name__)

VOCABULARY_TIMEOUT_S = 60.0


class RankMemory(NamedTuple):
    """One rank's arena as its transports see it."""

    arena: Memory
    outgoing: ConvertingMemory | None = None  # what senders read instead, where spans can be turned
    incoming: Memory | None = None  # what receivers land in instead, where the wire is compressed


class LoadedEngine(NamedTuple):
    """An engine and what others must know of its model."""

    engine: Engine
    pool: PoolCard
    memories: tuple[RankMemory, ...] = ()  # of each rank; empty: the engine's own, where nothing can be turned
    runs_layers_apart: bool = True  # a step may begin while KV of its later layers is on the wire
    prepare: Callable[[], None] = lambda: None  # does on a thread of its own what the first grammar would wait for

    @property
    def rank_memories(self) -> tuple[RankMemory, ...]:
        return self.memories or (RankMemory(self.engine.memory),)


def load_engine(config: WorkerConfig, model_path: Path) -> LoadedEngine:
    """Read weights and allocate the arena. Raises ConfigurationError."""
    from disagg.engine.arena import max_blocks_for  # torch takes a second to import
    from disagg.engine.device import resolve_device
    from disagg.engine.generic import describe_model
    from disagg.engine.runner import TorchEngine
    from disagg.engine.span_conversion import rank_memory

    model = describe_model(model_path)
    if model.sliding_window is not None and model.max_context == model.sliding_window:
        _log.info("context of %s is cut to its sliding window of %d tokens", model_path, model.sliding_window)
    layout = model.kv_layout(config.block_size, config.kv_dtype.value)
    num_blocks = config.num_blocks or max_blocks_for(layout, config.kv_memory_bytes)
    vocabulary = read_vocabulary(model_path)
    grammars = _Grammars(model_path, vocabulary)
    engine = TorchEngine(
        model_path,
        num_blocks=num_blocks,
        block_size=config.block_size,
        device=resolve_device(config.device),
        num_threads=config.num_threads,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        kernels=config.kernels,
        start_grammar=grammars.start,
    )
    if config.numerics is Numerics.EXACT and not engine.is_row_invariant:
        how = "is computed by torch here, whose sums change with the batch" if model.is_native else "is not native here"
        text = f"{model.architecture} {how}, so its answers depend on what is computed beside them"
        raise ConfigurationError(f"{text}: exact numerics cannot be promised, add --numerics bounded")
    pool = PoolCard(
        model=config.served_name,
        model_digest=model_digest(model_path),
        tokenizer_digest=vocabulary.digest,
        numerics=Numerics(config.numerics),
        vocab_size=model.vocab_size,
        max_context=min(model.max_context, config.max_context or model.max_context),
        arithmetic=engine.arithmetic,
    )
    outgoing, incoming = rank_memory(engine.arena, config.kv_wire)
    memories = (RankMemory(engine.memory, outgoing, incoming),)
    return LoadedEngine(engine, pool, memories, engine.runs_layers_apart, grammars.make_ready)


class _Grammars:
    """Starts grammars over a model's vocabulary, which a thread of its own makes ready, when told or at the first."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vocabulary")
        self._lock = threading.Lock()
        self._compiler: Future[GrammarCompiler] | None = None

    def make_ready(self) -> None:
        """Returns at once. Idempotent, from any thread."""
        with self._lock:
            if self._compiler is None:
                self._compiler = self._threads.submit(self._compile)
                self._threads.shutdown(wait=False)  # nothing comes after it

    def start(self, spec: GrammarSpec) -> GrammarState:
        """Raises InvalidRequest for what is no grammar, and with the reason where this model can follow none."""
        self.make_ready()
        assert self._compiler is not None
        try:
            compiler = self._compiler.result(VOCABULARY_TIMEOUT_S)
        except ConfigurationError as error:
            raise InvalidRequest(f"structured answers cannot be had of this model here: {error}") from None
        return compiler.start(spec)

    def _compile(self) -> GrammarCompiler:
        try:
            return GrammarCompiler(load_tokenizer(self._path, self._vocabulary))
        except ConfigurationError as error:
            _log.info("structured answers are refused: %s", error)
            raise
