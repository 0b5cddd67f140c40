"""Sizes, lists and addresses as people type them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.cli.sizes import format_bytes, parse_address, parse_bytes, parse_cores, parse_models
from disagg.core.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("1048576", 1 << 20), ("512M", 1 << 29), ("2G", 1 << 31), ("1.5GiB", 3 << 29), (" 64 kb ", 65536)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "2X", "1e9", "two", "1 2"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no size"):
        parse_bytes(text)


@given(st.integers(0, 1 << 50))
def test_a_size_survives_being_written(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == num_bytes


def test_cores() -> None:
    assert parse_cores("") == ()
    assert parse_cores("0, 2,4-7") == (0, 2, 4, 5, 6, 7)
    for text in ("a", "1-", "-1", "1-b"):
        with pytest.raises(ConfigurationError, match="is no list of cores"):
            parse_cores(text)


def test_models() -> None:
    assert parse_models(["a=/x", "b=/y=z"]) == (("a", "/x"), ("b", "/y=z"))
    for text in ("a", "=x", "a="):
        with pytest.raises(ConfigurationError, match="NAME=PATH"):
            parse_models([text])


@pytest.mark.parametrize("text", ["127.0.0.1:8001", "node-7:1", "::1:65535"])
def test_an_address_stays_as_it_is(text: str) -> None:
    assert parse_address(text) == text


@pytest.mark.parametrize("text", ["", "node-7", ":8001", "node-7:", "node-7:x", "node-7:0", "node-7:65536", "a:-1"])
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{text}' is no address: write host:port"):
        parse_address(text)
