"""The configuration file of a router, from its spec and what the operator sets by default. Pure.

It is mounted, and a router follows it: no change of it rolls a pod. What a router cannot change
while it runs are arguments, see `router`.
"""

from __future__ import annotations

import json
from typing import Any, Final

from kvoy_operator.durations import Duration
from kvoy_operator.spec_router import RouterBehavior, RouterOptions

_KEYS: Final = {
    "flow_control": {
        "max_waiting": "max-waiting",
        "max_waiting_per_tenant": "max-waiting-per-tenant",
        "max_waiting_per_priority": "max-waiting-per-priority",
        "max_wait": "max-waiting-s",
        "max_engine_wait": "max-engine-wait-s",
        "shared_wait": "shared-wait",
        "age_after": "age-s",
        "aged_share": "aged-share",
        "max_held": "max-held",
        "max_hold": "max-held-s",
        "objectives": "objective",
    },
    "failover": {
        "max_retries": "max-retries",
        "max_resumes": "max-resumes",
        "hang_timeout": "hang-timeout-s",
        "retry_share": "retry-share",
        "retry_burst": "retry-burst",
        "breaker_failures": "breaker-failures",
        "breaker_pause": "breaker-pause-s",
        "hedge": "hedge",
        "hedge_after": "hedge-after-s",
    },
    "timeouts": {
        "request": "request-timeout-s",
        "connect": "connect-timeout-s",
        "first_byte": "first-byte-timeout-s",
        "whole_answer": "whole-answer-timeout-s",
        "idle": "idle-timeout-s",
    },
}
"""Of each part of the spec: the router's name for each of its fields."""


_WORDS: Final = {"None": "off", "Observed": "observed", "Fixed": "fixed"}
"""The router's, where a spec has others: `off` without quotes is no text in YAML."""


def router_config(settings: RouterOptions, defaults: RouterBehavior) -> dict[str, Any]:
    """By the router's own names. What neither says is the router's own default."""
    config: dict[str, Any] = {"policy": settings.policy}
    for part, keys in _KEYS.items():
        for name, key in keys.items():
            value = _chosen(settings, defaults, part, name)
            if value is not None:
                config[key] = _as_setting(value)
    return config


def render_router_config(settings: RouterOptions, defaults: RouterBehavior) -> str:
    """The file's text; the same settings give the same text."""
    config = router_config(settings, defaults)
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in sorted(config.items()))


def request_timeout_s(settings: RouterOptions, defaults: RouterBehavior) -> int:
    """How long a request may take, rounded up; 0: what the router takes by itself."""
    timeout: Duration | None = _chosen(settings, defaults, "timeouts", "request")
    return timeout.whole_seconds if timeout is not None else 0


def _chosen(settings: RouterOptions, defaults: RouterBehavior, part: str, name: str) -> Any:
    value = getattr(getattr(settings, part), name)
    return getattr(getattr(defaults, part), name) if value is None else value


def _as_setting(value: Any) -> Any:
    if isinstance(value, Duration):
        return value.seconds
    if isinstance(value, dict):
        return [f"{name}={priority}" for name, priority in sorted(value.items())]
    return _WORDS.get(value, value)
