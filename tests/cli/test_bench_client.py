"""The load client's connections."""

from __future__ import annotations

import pytest

from kvoy_cli.bench import client as clients
from kvoy_cli.bench.request import chat
from kvoy_contract.testing import FakeEngine


@pytest.mark.parametrize(("keep_s", "num_connections"), [(clients.KEEP_S, 1), (0.0, 3)])
async def test_a_connection_is_used_again_unless_it_was_idle_too_long(
    keep_s: float, num_connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server closes it some time, perhaps while a request is on its way."""
    monkeypatch.setattr(clients, "KEEP_S", keep_s)
    engine = FakeEngine()
    await engine.start_http()
    try:
        async with clients.Client(engine.address) as client:
            request = chat("m", [{"role": "user", "content": "hi"}], 1, stream=False)
            outcomes = [await client.send(request) for _ in range(3)]
        assert all(outcome.is_ok for outcome in outcomes), outcomes[0].error
        assert engine.num_connections == num_connections
    finally:
        await engine.stop_http()
