"""Who may serve a request at all. Each filter names why an endpoint is out.

Two kinds: hard ones (not ready, draining, prefill only, already tried), and preferences that yield
when they would leave nobody: a stale endpoint is better than none, and so is one whose engine will
answer with its own message about a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoy_router.endpoint import Endpoint, Role
from kvoy_router.request import InferenceRequest

Rejection = tuple[str, str]
"""(endpoint id, reason)"""
Filter = Callable[[Endpoint], str | None]
"""Why this endpoint is out; None keeps it."""

_PREFILL = Role.PREFILL


def is_serving(exclude: frozenset[str]) -> Filter:
    def check(endpoint: Endpoint) -> str | None:
        if endpoint.id in exclude:
            return "excluded"
        load = endpoint.load
        if endpoint.is_draining or (load is not None and load.draining):
            return "draining"
        if load is not None and not load.ready:
            return "not ready"
        info = endpoint.info
        if info is not None and info.role is _PREFILL:
            return "prefill only"
        return None

    return check


def can_hold_prompt(request: InferenceRequest) -> Filter:
    """The prompt and one token of output fit."""
    return _fits(request.num_prompt_tokens + 1)


def can_hold_output(request: InferenceRequest) -> Filter:
    """The prompt and all of the output that the client asked for fit."""
    return _fits(request.num_prompt_tokens + max(request.max_tokens or 1, 1))


def is_fresh(now_s: float, stale_after_s: float) -> Filter:
    def check(endpoint: Endpoint) -> str | None:
        if endpoint.is_fresh(now_s, stale_after_s):
            return None
        return "telemetry lost" if endpoint.load is None else "telemetry stale"

    return check


def is_of(service: str) -> Filter:
    """The service that this request falls to, of several that serve its model."""

    def check(endpoint: Endpoint) -> str | None:
        return None if endpoint.origin.service == service else f"the share of service {service}"

    return check


def keep(
    endpoints: Sequence[Endpoint], check: Filter, rejected: list[Rejection]
) -> Sequence[Endpoint]:
    """Those that pass; reasons for the others are appended to `rejected`."""
    kept: list[Endpoint] = []
    for endpoint in endpoints:
        reason = check(endpoint)
        if reason is None:
            kept.append(endpoint)
        else:
            rejected.append((endpoint.id, reason))
    return kept


def prefer(
    endpoints: Sequence[Endpoint], check: Filter, rejected: list[Rejection]
) -> Sequence[Endpoint]:
    """Like `keep`, but all of them when nobody passes."""
    reasons: list[Rejection] = []
    kept = keep(endpoints, check, reasons)
    if not kept:
        return endpoints
    rejected.extend(reasons)
    return kept


def _fits(num_tokens: int) -> Filter:
    def check(endpoint: Endpoint) -> str | None:
        info = endpoint.info
        if info is None:
            return None
        if info.max_model_len and num_tokens > info.max_model_len:
            return "context too short"
        if info.num_blocks and num_tokens > info.num_blocks * info.block_size:
            return "too few blocks"
        return None

    return check
