"""Why a process of a pod could not start, for whoever reads the pod's status.

Kubernetes shows what a container leaves in its termination log (`/dev/termination-log`, or what
`KVOY_TERMINATION_LOG` names) as the message of its end. Outside a pod nothing is written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_DEFAULT_PATH: Final = "/dev/termination-log"
_MAX_CHARS: Final = 1024
"""Kubernetes keeps 4096 bytes of one container."""


def leave(reason: str, text: str, environment: Mapping[str, str]) -> None:
    """Write `REASON: text` as one line, where this is a pod and the file can be written."""
    path = Path(environment.get("KVOY_TERMINATION_LOG", _DEFAULT_PATH))
    is_pod = "KUBERNETES_SERVICE_HOST" in environment
    if not (is_pod and path.is_file() and os.access(path, os.W_OK)):
        return
    line = " ".join(f"{reason}: {text}".split())[:_MAX_CHARS]
    try:
        path.write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("last words cannot be written path=%s reason=%s", path, error)
