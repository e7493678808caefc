"""A file that may be replaced at any time, as editors and mounted Secrets are: read when it has
changed."""

from __future__ import annotations

import os
from pathlib import Path

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
            stamp: object = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError as error:
            stamp = str(error)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        return self.path.read_text()
