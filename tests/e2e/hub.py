"""A model hub inside the cluster: one model behind a token; a line of output for each request.

hub.py ORG/NAME FOLDER TOKEN
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from kvoy_engine.hub_testing import Repository, StandInHub

PORT = 8080


class _Printed(list[Any]):
    def append(self, request: Any) -> None:
        print(json.dumps(request), flush=True)


def main(name: str, folder: Path, token: str) -> None:
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    with StandInHub({name: Repository(files, token=token)}, ("0.0.0.0", PORT)) as hub:
        hub.requests = _Printed()
        signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    # For threads as well, which take over what is blocked when they begin.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
