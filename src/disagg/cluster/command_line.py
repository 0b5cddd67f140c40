"""A process's configuration written as the command line that means the same. Defaults are left out."""

import enum
from collections.abc import Collection

import msgspec

from disagg.router.config import API_KEYS_VARIABLE, RouterConfig
from disagg.worker.config import WorkerConfig

_RENAMED = {"kv_memory_bytes": "--kv-memory"}


def worker_arguments(config: WorkerConfig) -> tuple[str, ...]:
    """Arguments after `python -m disagg`."""
    return ("worker", config.model, *_flags(config, skipped=("model",)))


def router_arguments(config: RouterConfig) -> tuple[str, ...]:
    """Arguments after `python -m disagg`."""
    models = tuple(part for name, path in config.models for part in ("--model", f"{name}={path}"))
    origins = tuple(part for origin in config.cors_origins for part in ("--cors-origin", origin))
    return ("router", *models, *origins, *_flags(config, skipped=("models", "cors_origins", "api_keys")))


def router_environment(config: RouterConfig) -> tuple[tuple[str, str], ...]:
    """What other users of the machine must not read off a command line."""
    return ((API_KEYS_VARIABLE, " ".join(config.api_keys)),) if config.api_keys else ()


def _flags(config: msgspec.Struct, skipped: Collection[str]) -> tuple[str, ...]:
    parts: list[str] = []
    for field in msgspec.structs.fields(config):
        value: object = getattr(config, field.name)
        if field.name not in skipped and value != field.default and value is not None:
            name = _RENAMED.get(field.name, "--" + field.name.replace("_", "-"))
            parts += (name,) if value is True else (name, _text(value))
    return tuple(parts)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value.value) if isinstance(value, enum.Enum) else str(value)
