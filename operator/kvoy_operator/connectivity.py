"""Says once that the API server does not answer, and once that it does again."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

_NUM_IN_A_ROW = 3
"""Calls without an answer before it counts: one may be a connection that was closed while idle."""


class Connectivity:
    def __init__(self) -> None:
        self._num_unanswered = 0

    def observe_call(self, method: str, path: str, code: int) -> None:
        """`api.Observer`."""
        if code == 0:
            self._num_unanswered += 1
            if self._num_unanswered == _NUM_IN_A_ROW:
                log.warning("the API server does not answer", extra={"path": path})
            return
        if self._num_unanswered >= _NUM_IN_A_ROW:
            log.info("the API server answers again")
        self._num_unanswered = 0
