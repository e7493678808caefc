"""Which engines there are: a fixed list, and a file that may change at any time.

A file that cannot be read or understood changes nothing: the engines known before stay, and the log
says what is wrong, once per change of the file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvoy_router.config import EngineAddress, split_address
from kvoy_router.watched_file import POLL_S, WatchedFile

log = logging.getLogger(__name__)


def parse_engines(text: str) -> list[EngineAddress]:
    """Read `engines: [{address: HOST:PORT, telemetry: HOST:PORT}]`; an entry may also be a plain
    `HOST:PORT[@TELEMETRY_PORT]`. Raises ValueError naming the entry."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None
    if not isinstance(document, dict) or set(document) != {"engines"}:
        raise ValueError("expected the one key `engines`")
    entries = document["engines"] or []
    if not isinstance(entries, list):
        raise ValueError("engines: expected a list")
    engines = [_parse_entry(index, entry) for index, entry in enumerate(entries)]
    if len({engine.http for engine in engines}) < len(engines):
        raise ValueError("engines: the same address twice")
    return engines


def _parse_entry(index: int, entry: Any) -> EngineAddress:
    try:
        if isinstance(entry, str):
            return EngineAddress.parse(entry)
        if not isinstance(entry, dict) or not {"address"} <= set(entry) <= {"address", "telemetry"}:
            raise ValueError("expected `address` and perhaps `telemetry`")
        engine = EngineAddress.parse(str(entry["address"]))
        if "telemetry" not in entry:
            return engine
        host, port = split_address(str(entry["telemetry"]))
        return EngineAddress(engine.http, f"{host}:{port}")
    except ValueError as error:
        raise ValueError(f"engines[{index}]: {error}") from None


class Discovery:
    """Keeps `apply` informed of the whole list, static and from the file, whenever it changes."""

    def __init__(
        self,
        static: Sequence[EngineAddress],
        file: Path | None,
        apply: Callable[[Sequence[EngineAddress]], None],
        poll_s: float = POLL_S,
    ) -> None:
        self._static = tuple(static)
        self._file = WatchedFile(file) if file else None
        self._apply = apply
        self._poll_s = poll_s
        self._has_applied = False
        self.error: str | None = None
        """What is wrong with the file as it is now."""

    async def run(self) -> None:
        """Apply the list, and watch the file for ever."""
        if self._file is None:
            self._apply(self._static)
            return
        while True:
            self.check()
            await asyncio.sleep(self._poll_s)

    def check(self) -> None:
        """Read the file if it has changed since the last call."""
        assert self._file is not None
        is_first, self._has_applied = not self._has_applied, True
        try:
            text = self._file.read_if_changed()
            if text is None:
                return
            engines = parse_engines(text)
        except (OSError, ValueError) as error:
            self.error = str(error)
            log.error(
                "engines file is unusable, the engines stay as they were",
                extra={"file": str(self._file.path), "error": self.error},
            )
            if is_first:
                self._apply(self._static)
            return
        self.error = None
        known = {engine.http for engine in self._static}
        self._apply([*self._static, *(e for e in engines if e.http not in known)])
