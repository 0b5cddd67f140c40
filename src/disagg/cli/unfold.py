"""Flags as typed values: a command's parameter whose type is a Struct stands for one flag of each of its fields.

    @unfolded
    def serve(model: ModelArgument, worker: WorkerFlags, router: RouterFlags) -> None: ...

So a flag that several commands have is written once: its type, its default and its help, as a field. A field that two
structs of one command have is one flag, and goes to both.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import msgspec


def unfolded(command: Callable[..., None]) -> Callable[..., None]:
    """The same command as typer must see it: with a parameter for each flag."""
    hints = get_type_hints(command, include_extras=True)
    structs = {
        name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    own = {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name not in structs
    }
    flags = dict(own)
    for kind in structs.values():
        flags |= {flag.name: flag for flag in _flags(kind) if flag.name not in flags}

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        folded = {
            name: kind(**{field: given[field] for field in kind.__struct_fields__}) for name, kind in structs.items()
        }
        command(**{name: given[name] for name in own}, **folded)

    flat.__annotations__ = {name: flag.annotation for name, flag in flags.items()}
    flat.__signature__ = inspect.Signature(list(flags.values()))  # type: ignore[attr-defined]  # what typer reads
    return flat


def _flags(kind: type[msgspec.Struct]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        default = inspect.Parameter.empty if field.default is msgspec.NODEFAULT else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )


def same_named(flags: msgspec.Struct, config: type[msgspec.Struct]) -> dict[str, Any]:
    """The flags that are fields of a configuration as they are."""
    return {name: getattr(flags, name) for name in flags.__struct_fields__ if name in config.__struct_fields__}
