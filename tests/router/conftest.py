"""Fake engines and an HTTP client for the tests of the router's I/O."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvoy_contract.testing import FakeEngine
from kvoy_router.testing import SECRET

StartEngine = Callable[..., Awaitable[FakeEngine]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Starts fake engines that know the secret, and stops them at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> FakeEngine:
            return await stack.enter_async_context(FakeEngine(**{"secret": SECRET} | options))

        yield start
