"""Ports that tests hand to processes: whoever gets one may listen on it much later."""

from __future__ import annotations

from kvoy_contract.testing_ports import free_port


def test_no_port_is_given_twice() -> None:
    pairs = [free_port((0, 1)) for _ in range(200)]
    ports = [*pairs, *(base + 1 for base in pairs), *(free_port() for _ in range(200))]

    assert len(set(ports)) == len(ports) == 600
