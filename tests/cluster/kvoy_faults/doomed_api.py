"""An API client that ends its operator at a chosen call, as a lost node does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from kvoy_operator.api import JSON, Api


class Killed(BaseException):
    """The operator is dead: no handler of errors may take note of it."""


class DoomedApi(Api):
    """`api`, until the call that `arm` names. Dry runs change nothing and do not count."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.writes: list[str] = []
        """Methods and paths since `arm`."""
        self._last: int | None = None
        self._is_applied = False
        self._is_dead = False
        self._under_way: dict[asyncio.Task[Any] | None, tuple[float, str]] = {}

    def describe(self) -> dict[str, Any]:
        """For the message of a test that fails."""
        now_s = time.monotonic()
        return {
            "is dead": self._is_dead,
            "dies at write": self._last,
            "writes": len(self.writes),
            "last writes": self.writes[-5:],
            "calls under way": [
                f"{call} for {now_s - since_s:.1f} s" for since_s, call in self._under_way.values()
            ],
        }

    def arm(self, last: int | None, *, is_applied: bool) -> None:
        """Die at the write number `last` from now on, counted from 1; None: never. `is_applied`:
        the server carries it out, and the operator does not hear of it."""
        self.writes = []
        self._last = last
        self._is_applied = is_applied

    async def close(self) -> None:
        """The connections are others' too."""

    async def raw(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
        timeout_s: float | None = None,
    ) -> bytes:
        self._check_alive()
        is_last = False
        if method != "GET" and "dryRun" not in (params or {}):
            self.writes.append(f"{method} {path}")
            is_last = len(self.writes) == self._last
        if is_last:
            self._is_dead = True
            if not self._is_applied:
                raise Killed
        caller = asyncio.current_task()
        self._under_way[caller] = (time.monotonic(), f"{method} {path}")
        try:
            answer = await self._api.raw(
                method,
                path,
                params=params,
                body=body,
                content_type=content_type,
                accept=accept,
                timeout_s=timeout_s,
            )
        finally:
            del self._under_way[caller]
        self._check_alive()
        return answer

    def _check_alive(self) -> None:
        if self._is_dead:
            raise Killed
