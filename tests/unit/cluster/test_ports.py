"""Ports that are kept for a server."""

import socket

import pytest

from disagg.cluster.ports import reserve_port
from disagg.core.errors import ConfigurationError


def test_nobody_answers_on_a_reserved_port_until_who_is_told_it_listens_and_it_may_come_back() -> None:
    with reserve_port("127.0.0.1") as reserved:
        address = reserved.getsockname()
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, 5.0)
            with socket.create_server(address), socket.create_connection(address, 5.0) as client:
                assert client.getpeername() == address


def test_two_reserved_ports_differ() -> None:
    with reserve_port("127.0.0.1") as one, reserve_port("127.0.0.1") as other:
        assert one.getsockname() != other.getsockname()


def test_a_host_that_is_not_here_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"no port can be had on 203\.0\.113\.7"):
        reserve_port("203.0.113.7")
