"""The one place that loads heavy engine back ends."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from disagg.core.errors import ConfigurationError, InvalidRequest
from disagg.core.grammar import GrammarSpec
from disagg.core.roles import Numerics
from disagg.kvcache.conversion import ConvertingMemory
from disagg.kvcache.memory import Memory
from disagg.modelfiles.digest import model_digest
from disagg.modelfiles.grammar import GrammarCompiler, GrammarState
from disagg.modelfiles.tokenizer import load_tokenizer, tokenizer_digest
from disagg.protocol.messages import PoolCard
from disagg.scheduler.engine import Engine
from disagg.worker.config import WorkerConfig

_log = logging.getLogger(__name__)


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
    digest, start_grammar = _vocabulary(model_path)
    engine = TorchEngine(
        model_path,
        num_blocks=num_blocks,
        block_size=config.block_size,
        device=resolve_device(config.device),
        num_threads=config.num_threads,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        kernels=config.kernels,
        start_grammar=start_grammar,
    )
    if config.numerics is Numerics.EXACT and not engine.is_row_invariant:
        text = f"{model.architecture} is not native here, so its answers depend on what is computed beside them"
        raise ConfigurationError(f"{text}: exact numerics cannot be promised, add --numerics bounded")
    pool = PoolCard(
        model=config.served_name,
        model_digest=model_digest(model_path),
        tokenizer_digest=digest,
        numerics=Numerics(config.numerics),
        vocab_size=model.vocab_size,
        max_context=min(model.max_context, config.max_context or model.max_context),
        arithmetic=engine.arithmetic,
    )
    outgoing, incoming = rank_memory(engine.arena, config.kv_wire)
    memories = (RankMemory(engine.memory, outgoing, incoming),)
    return LoadedEngine(engine, pool, memories, engine.runs_layers_apart)


def _vocabulary(model_path: Path) -> tuple[str, Callable[[GrammarSpec], GrammarState]]:
    """The tokenizer's digest, and what starts grammars over its bytes or says why that cannot be."""
    try:
        tokenizer = load_tokenizer(model_path)
        return tokenizer.digest, GrammarCompiler(tokenizer).start
    except ConfigurationError as error:  # a model that cannot be read at all fails at its digest
        reason = str(error)
    _log.info("structured answers are refused: %s", reason)

    def refuse(spec: GrammarSpec) -> GrammarState:
        raise InvalidRequest(f"structured answers cannot be had of this model here: {reason}")

    return tokenizer_digest(model_path), refuse
