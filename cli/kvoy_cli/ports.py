"""Whether the ports that a stack needs are free, before anything is started."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from kvoy_cli.errors import CommandError


@dataclass(frozen=True, slots=True)
class PortUse:
    port: int
    purpose: str
    """For people: `the router`."""
    option: str
    """The option that moves it."""


def check_ports(host: str, uses: Sequence[PortUse]) -> None:
    """Raise CommandError naming every port that cannot be bound, and who holds it."""
    if len({use.port for use in uses}) < len(uses):
        ports = ", ".join(f"{use.port} ({use.purpose})" for use in uses)
        raise CommandError(f"two parts would share a port: {ports}")
    problems = [problem for use in uses if (problem := _problem(host, use))]
    if problems:
        raise CommandError("\n  ".join(["nothing was started:", *problems]))


def _problem(host: str, use: PortUse) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: connections that are closing do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, use.port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                reason = f"in use{_holder(use.port)}"
            return f"port {use.port} for {use.purpose}: {reason}; choose another with {use.option}"
    return None


def _holder(port: int) -> str:
    """` by NAME (pid N)` where the system tells, else nothing."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            is_there = connection.laddr and connection.laddr.port == port
            if is_there and connection.status == psutil.CONN_LISTEN and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""
