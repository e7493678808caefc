"""An event loop whose clock jumps to the next timer: hours of backoff pass in no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting, moves the loop's clock on."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now_s += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end, beginning at second 0."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        runner.run(main)
