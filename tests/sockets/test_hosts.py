"""Hosts of either IP family, as endpoints and URLs have them, and the listener of both."""

from __future__ import annotations

import socket

import pytest

from stage_runtime.sockets.endpoints import hosts


@pytest.mark.parametrize(
    ("host", "shown"),
    [("10.0.0.1", "10.0.0.1"), ("fd00::1", "[fd00::1]"), ("[fd00::1]", "[fd00::1]"), ("name.svc", "name.svc")],
)
def test_an_ipv6_address_has_brackets_once(host: str, shown: str) -> None:
    assert hosts.bracketed(host) == shown


@pytest.mark.parametrize(
    ("endpoint", "written"),
    [
        ("tcp://10.0.0.1:5550", "tcp://10.0.0.1:5550"),
        ("tcp://fd00::1:5550", "tcp://[fd00::1]:5550"),
        ("tcp://[fd00::1]:5550", "tcp://[fd00::1]:5550"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("ipc:///run/a:b.sock", "ipc:///run/a:b.sock"),
    ],
)
def test_an_endpoint_is_written_as_libzmq_takes_it(endpoint: str, written: str) -> None:
    assert hosts.written_out(endpoint) == written


@pytest.mark.parametrize(("everywhere", "written"), [("::", "tcp://[::]:5550"), ("0.0.0.0", "tcp://0.0.0.0:5550")])
def test_anywhere_is_every_address_of_the_machine(everywhere: str, written: str) -> None:
    assert hosts.written_out("tcp://*:5550", lambda: everywhere) == written
    assert [hosts.host(one, lambda: everywhere) for one in ("*", "10.0.0.1")] == [everywhere, "10.0.0.1"]


def test_the_listener_of_everywhere_takes_connections_to_every_loopback_address() -> None:
    host = hosts.everywhere()
    with hosts.listener(host, 0, backlog=4) as listening:
        port = listening.getsockname()[1]
        for address in ("127.0.0.1", *(("::1",) if host == "::" else ())):
            with socket.create_connection((address, port), timeout=60):
                pass
        assert not listening.getblocking()


def test_a_kernel_without_ipv6_has_ipv4_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> socket.socket:
        raise OSError("Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", refused)
    assert hosts.everywhere() == "0.0.0.0"
