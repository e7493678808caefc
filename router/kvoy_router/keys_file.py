"""The file with the API keys: read at the start, and again whenever it changes.

At the start a bad file is an error. Later it changes nothing: the keys known before stay, the log
says what is wrong, once per change, and a gauge is 0 until the file is good again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvoy_router.keys import Key, Keyring
from kvoy_router.watched_file import POLL_S, FollowedFile

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


class KeysFile(FollowedFile[Keyring]):
    """`keyring` is what holds now; `apply` hears of every new one."""

    unusable = "keys file is unusable, the keys stay as they were"

    def __init__(
        self, path: Path, apply: Callable[[Keyring], None], poll_s: float = POLL_S
    ) -> None:
        """Raises OSError or ValueError when there is no good file to begin with."""
        super().__init__(path, poll_s)
        self._apply = apply
        text = self._file.read_if_changed()
        assert text is not None, "a first look sees everything"
        self.keyring = parse_keys(text)

    def _parse(self, text: str) -> Keyring:
        return parse_keys(text)

    def _take(self, content: Keyring) -> None:
        self.keyring = content
        self._apply(content)
        log.info("keys file read", extra={"keys": len(content)})


def _place(error: msgspec.DecodeError) -> str:
    """Where it is wrong, without the line itself: that may hold what nobody should log."""
    mark = getattr(error.__context__, "problem_mark", None)
    return "cannot be read" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
