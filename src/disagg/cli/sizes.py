"""Sizes, lists and addresses as people type them."""

import re

from disagg.core.endpoints import is_dialable
from disagg.core.errors import ConfigurationError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """'512M', '2G', '1.5GiB', '1048576' -> bytes; K, M, G, T are powers of 1024. Raises ConfigurationError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"{text!r} is no size: write bytes or a number with K, M, G or T, such as 512M or 2G")
    number, unit = match.groups()
    return int(float(number) * _UNITS[unit.upper()]) if "." in number else int(number) * _UNITS[unit.upper()]


def format_bytes(num_bytes: int) -> str:
    """The shortest text that parse_bytes reads back exactly."""
    for unit in ("T", "G", "M", "K"):
        if num_bytes and num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}"
    return str(num_bytes)


def parse_cores(text: str) -> tuple[int, ...]:
    """'0,2,4-7' -> (0, 2, 4, 5, 6, 7); '' -> (). Raises ConfigurationError."""
    cores: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigurationError(f"{text!r} is no list of cores: write numbers and ranges, such as 0,2,4-7")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def parse_models(texts: list[str]) -> tuple[tuple[str, str], ...]:
    """('name=path', ...) -> ((name, path), ...). Raises ConfigurationError."""
    pairs: list[tuple[str, str]] = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigurationError(f"{text!r} names no model: write NAME=PATH")
        pairs.append((name, path))
    return tuple(pairs)


def parse_address(text: str) -> str:
    """'host:port' as it is, with a port from 1 to 65535. Raises ConfigurationError."""
    if not is_dialable(text):
        raise ConfigurationError(f"{text!r} is no address: write host:port, such as 127.0.0.1:8001")
    return text
