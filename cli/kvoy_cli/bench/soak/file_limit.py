"""Open files for thousands of connections."""

from __future__ import annotations

import resource

from kvoy_cli.bench.processes import BenchError

_OTHERS = 1024
"""Files of a process that are no streams: listeners, telemetry, logs."""


def raise_file_limit(num_streams: int) -> None:
    """Allow this process and its children a router's two files for each stream. Raises BenchError
    where the system does not allow so many."""
    wanted = 2 * num_streams + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
        except (ValueError, OSError):
            raise BenchError(
                f"{num_streams:,} streams need {wanted:,} open files in the router, and this "
                f"process may have {hard:,}: raise the hard limit (`ulimit -Hn`, LimitNOFILE=), or "
                "ask for fewer --streams"
            ) from None
