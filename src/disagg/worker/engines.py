"""The one place that loads heavy engine back ends."""

from pathlib import Path
from typing import NamedTuple

from disagg.core.roles import Numerics
from disagg.modelfiles.config import read_config
from disagg.modelfiles.digest import model_digest
from disagg.modelfiles.tokenizer import tokenizer_digest
from disagg.protocol.messages import PoolCard
from disagg.scheduler.engine import Engine
from disagg.worker.config import WorkerConfig


class LoadedEngine(NamedTuple):
    """An engine and what others must know of its model."""

    engine: Engine
    pool: PoolCard


def load_engine(config: WorkerConfig, model_path: Path) -> LoadedEngine:
    """Read weights and allocate the arena. Raises ConfigurationError."""
    from disagg.engine.arena import max_blocks_for  # torch takes a second to import
    from disagg.engine.device import resolve_device
    from disagg.engine.runner import TorchEngine

    model = read_config(model_path)
    layout = model.kv_layout(config.block_size, config.kv_dtype.value)
    num_blocks = config.num_blocks or max_blocks_for(layout, config.kv_memory_bytes)
    engine = TorchEngine(
        model_path,
        num_blocks=num_blocks,
        block_size=config.block_size,
        device=resolve_device(config.device),
        num_threads=config.num_threads,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        kernels=config.kernels,
    )
    pool = PoolCard(
        model=config.served_name,
        model_digest=model_digest(model_path),
        tokenizer_digest=tokenizer_digest(model_path),
        numerics=Numerics(config.numerics),
        vocab_size=model.vocab_size,
        max_context=min(model.max_context, config.max_context or model.max_context),
        arithmetic=engine.arithmetic,
    )
    return LoadedEngine(engine, pool)
