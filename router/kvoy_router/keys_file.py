"""The file with the API keys: read at the start, and again whenever it changes.

At the start a bad file is an error. Later it changes nothing: the keys known before stay, the log
says what is wrong, once per change, and a gauge is 0 until the file is good again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvoy_router.keys import Key, Keyring
from kvoy_router.watched_file import POLL_S, WatchedFile

log = logging.getLogger(__name__)


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[Key, ...]


def parse_keys(text: str) -> Keyring:
    """Read `keys: [...]`, in YAML or JSON. Raises ValueError that names the wrong field."""
    try:
        # In two steps, so that times may be written with and without quotes.
        document = msgspec.convert(msgspec.yaml.decode(text), _Document)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"not YAML: {_place(error)}") from None
    return Keyring(document.keys)


class KeysFile:
    """`keyring` is what holds now; `apply` hears of every new one."""

    def __init__(
        self, path: Path, apply: Callable[[Keyring], None], poll_s: float = POLL_S
    ) -> None:
        """Raises OSError or ValueError when there is no good file to begin with."""
        self._file = WatchedFile(path)
        self._apply = apply
        self._poll_s = poll_s
        self.error: str | None = None
        """What is wrong with the file as it is now."""
        text = self._file.read_if_changed()
        assert text is not None, "a first look sees everything"
        self.keyring = parse_keys(text)

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
            keyring = parse_keys(text)
        except (OSError, ValueError) as error:
            self.error = str(error)
            log.error(
                "keys file is unusable, the keys stay as they were",
                extra={"file": str(self._file.path), "error": self.error},
            )
            return
        self.error = None
        self.keyring = keyring
        self._apply(keyring)
        log.info("keys file read", extra={"keys": len(keyring)})


def _place(error: msgspec.DecodeError) -> str:
    """Where it is wrong, without the line itself: that may hold what nobody should log."""
    mark = getattr(error.__context__, "problem_mark", None)
    return "cannot be read" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
