"""The file in which an operator says whose engines this router may use.

A file that cannot be read or understood changes nothing: the services known before stay, and the
log says what is wrong, once per change of the file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from kvoy_contract.fleet import Fleet, parse_fleet
from kvoy_router.watched_file import POLL_S, FollowedFile

log = logging.getLogger(__name__)


class FleetFile(FollowedFile[Fleet]):
    """`apply` hears of every new content."""

    unusable = "fleet file is unusable, the services stay as they were"

    def __init__(self, path: Path, apply: Callable[[Fleet], None], poll_s: float = POLL_S) -> None:
        super().__init__(path, poll_s)
        self._apply = apply
        self.was_read = False
        """Whether it has been good once."""

    def _parse(self, text: str) -> Fleet:
        return parse_fleet(text)

    def _take(self, content: Fleet) -> None:
        self.was_read = True
        self._apply(content)
        log.info("fleet file read", extra={"services": [s.name for s in content.services]})
