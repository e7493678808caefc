"""The file of `--config`, followed while the router runs: a good change is applied, a bad one
changes nothing and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from kvoy_contract.settings import Settings
from kvoy_router.config import RouterConfig
from kvoy_router.watched_file import POLL_S, FollowedFile

log = logging.getLogger(__name__)

FIXED = frozenset(
    {
        "engine",
        "engines_file",
        "kubernetes",
        "kubernetes_namespace",
        "fleet_file",
        "model",
        "host",
        "port",
        "admin_port",
        "secret",
        "keys_file",
        "tls_certificate",
        "tls_key",
        "stale_after_s",
        "max_reports_per_s",
        "memory_mib",
        "index_mib",
        "decisions_kept",
        "log_format",
    }
)
"""Settings that hold from start to end: what the router listens on, whom it trusts, what it has
allocated. All others may change at any time."""


def changed(old: RouterConfig, new: RouterConfig) -> list[str]:
    """The settings that differ, as keys of the file. Raises ValueError for one of FIXED."""
    names = [
        field.name
        for field in fields(RouterConfig)
        if getattr(old, field.name) != getattr(new, field.name)
    ]
    for name in names:
        if name in FIXED:
            raise ValueError(
                f"{_key(name)}: cannot change while the router runs; restart it, or take the "
                "change back"
            )
    return [_key(name) for name in names]


class ConfigFile(FollowedFile[RouterConfig]):
    """`apply` hears of every new configuration that differs; `on_reload` of every new content of
    the file after the one that the router began with, with whether it was good."""

    unusable = "configuration file is unusable, the configuration stays as it was"

    def __init__(
        self,
        settings: Settings[RouterConfig],
        path: Path,
        apply: Callable[[RouterConfig], None],
        on_reload: Callable[[bool], None],
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__(path, poll_s)
        self._settings = settings
        self._apply = apply
        self._on_reload = on_reload
        self._is_first = True
        self.config = settings.values

    def _parse(self, text: str) -> RouterConfig:
        config = self._settings.reread(text)
        changed(self.config, config)
        return config

    def _refuse(self) -> None:
        self._is_first = False
        self._on_reload(False)

    def _take(self, content: RouterConfig) -> None:
        keys = changed(self.config, content)
        self.config = content
        is_start = self._is_first and not keys
        self._is_first = False
        if keys:
            self._apply(content)
        if not is_start:
            self._on_reload(True)
            log.info("configuration file read", extra={"changed": keys})


def _key(name: str) -> str:
    return name.replace("_", "-")
