"""`kvoy operator`: reads the configuration, operates until a signal, and says what went wrong."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from lightkube.core.exceptions import ConfigError
from prometheus_client import disable_created_metrics

from kvoy_contract import logs
from kvoy_contract.settings import read_settings
from kvoy_operator.config import OperatorConfig
from kvoy_operator.leader import LeadershipLost
from kvoy_operator.process import Operator

log = logging.getLogger(__name__)

_DESCRIPTION = (
    "Makes engines, routers and endpoints of the LLMServices and LLMRouters of a cluster, and "
    "keeps them as their specs say."
)
_QUIET = {
    # kopf retries in silence: `watch_health` says when a watch is refused, and when it works again.
    "kopf": logging.WARNING,
    "kopf._cogs.clients.watching": logging.CRITICAL,
    # It runs in a thread of its own and is stopped by a flag.
    "kopf._core.reactor.running": logging.ERROR,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run an operator; returns the exit status."""
    config = read_settings(OperatorConfig, "kvoy operator", _DESCRIPTION, argv)
    logs.configure(config.log_level, config.log_format)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
    # Else each counter has a second series beside it that nobody queries.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    status = 0
    try:
        asyncio.run(_operate(config))
    except* LeadershipLost as lost:
        # The work goes on elsewhere: this process must not write another byte.
        log.warning("gives up", extra={"why": str(lost.exceptions[0])})
        status = 1
    except* ConfigError as error:
        status = _complain(f"no cluster: {error.exceptions[0]}")
    except* OSError as error:
        status = _complain(f"port {config.port} on {config.host}: {error.exceptions[0]}")
    return status


async def _operate(config: OperatorConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Operator(config).run(stop)


def _complain(message: str) -> int:
    print(f"kvoy operator: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
