"""The file in which an operator says whose engines this router may use.

A file that cannot be read or understood changes nothing: the services known before stay, and the
log says what is wrong, once per change of the file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from kvoy_contract.fleet import Fleet, parse_fleet
from kvoy_router.watched_file import POLL_S, WatchedFile

log = logging.getLogger(__name__)


class FleetFile:
    """`apply` hears of every new content."""

    def __init__(self, path: Path, apply: Callable[[Fleet], None], poll_s: float = POLL_S) -> None:
        self._file = WatchedFile(path)
        self._apply = apply
        self._poll_s = poll_s
        self.was_read = False
        """Whether it has been good once."""
        self.error: str | None = None
        """What is wrong with the file as it is now."""

    async def run(self) -> None:
        """Watch the file for ever."""
        while True:
            self.check()
            await asyncio.sleep(self._poll_s)

    def check(self) -> None:
        """Read the file if it has changed since the last call."""
        try:
            text = self._file.read_if_changed()
            if text is None:
                return
            fleet = parse_fleet(text)
        except (OSError, ValueError) as error:
            self.error = str(error)
            log.error(
                "fleet file is unusable, the services stay as they were",
                extra={"file": str(self._file.path), "error": self.error},
            )
            return
        self.error = None
        self.was_read = True
        self._apply(fleet)
        log.info("fleet file read", extra={"services": [s.name for s in fleet.services]})
