"""The operator's own settings: what cannot work is refused by name."""

from __future__ import annotations

import re

import pytest

from kvoy_operator.config import OperatorConfig


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{timeouts: {request: 0s}}", "router-defaults: timeouts.request: must be from 1s to 24h"),
        ("{timeout: {}}", "router-defaults: timeout: no such field"),
        ("{flowControl: {maxWaiting: many}}", "router-defaults: flowControl.maxWaiting: "),
        ("{policy: random}", "router-defaults: policy: no such field"),
        ("[]", "router-defaults: must map fields to values"),
        ("", "router-defaults: must map fields to values"),
        ("{", "router-defaults: not YAML"),
    ],
)
def test_defaults_of_routers_that_cannot_work_are_refused_by_their_field(
    text: str, said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        OperatorConfig(router_defaults=text)


def test_defaults_of_routers_reach_what_is_rendered() -> None:
    config = OperatorConfig(router_defaults='{"failover":{"maxRetries":0}}')

    assert config.render_options(bytes(32)).router_defaults.failover.max_retries == 0
