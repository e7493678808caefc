"""A file that may be replaced at any time, as editors and mounted Secrets are: read when it has
changed."""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 1.0
"""Between two looks at it."""


class WatchedFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: object = None

    def read_if_changed(self) -> str | None:
        """The text when it is another one than at the last call, or the first; else None.

        Raises OSError when it cannot be read, once per change.
        """
        try:
            status = os.stat(self.path)
            # The time of the last change of anything, since rights may be what made it unreadable.
            stamp: object = (status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError as error:
            stamp = str(error)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        return self.path.read_text()


class FollowedFile(ABC, Generic[T]):
    """A watched file of a known form. A content that cannot be read or understood changes nothing:
    the log says what is wrong, once per change, and `error` until the file is good again."""

    unusable: ClassVar[str]
    """What the log says of a bad one."""

    def __init__(self, path: Path, poll_s: float = POLL_S) -> None:
        self._file = WatchedFile(path)
        self._poll_s = poll_s
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
            content = self._parse(text)
        except (OSError, ValueError) as error:
            self.error = str(error)
            log.error(self.unusable, extra={"file": str(self._file.path), "error": self.error})
            self._refuse()
            return
        self.error = None
        self._take(content)

    @abstractmethod
    def _parse(self, text: str) -> T:
        """Raises ValueError, which names what is wrong."""

    def _refuse(self) -> None:
        """A new content, which is bad, as `error` says."""

    @abstractmethod
    def _take(self, content: T) -> None:
        """A new content, which is good."""
