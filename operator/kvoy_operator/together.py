"""Several calls at the same time: each is mostly a wait for the server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def together(*calls: Coroutine[Any, Any, T]) -> list[T]:
    """What each returns, in their order. One that fails holds up none of the others; when all have
    ended, the first failure is raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
