"""Ports are checked before anything starts."""

from __future__ import annotations

import os
import socket

import pytest

from kvoy_cli.errors import CommandError
from kvoy_cli.ports import PortUse, check_ports
from kvoy_contract.testing_ports import free_port


def test_a_port_in_use_is_named_with_its_holder_and_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        with pytest.raises(CommandError) as refusal:
            check_ports("127.0.0.1", [PortUse(port, "the router", "--port")])

    message = str(refusal.value)
    assert f"port {port} for the router: in use" in message
    assert f"(pid {os.getpid()})" in message
    assert "--port" in message


def test_free_ports_pass_and_stay_free() -> None:
    port = free_port()

    check_ports("127.0.0.1", [PortUse(port, "the router", "--port")])

    socket.create_server(("127.0.0.1", port)).close()


def test_two_parts_on_one_port_are_refused() -> None:
    uses = [PortUse(8100, "the router", "--port"), PortUse(8100, "engine", "--engine-port")]

    with pytest.raises(CommandError, match="share a port"):
        check_ports("127.0.0.1", uses)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CommandError, match="port 8000"):
        check_ports("192.0.2.1", [PortUse(8000, "the router", "--port")])
