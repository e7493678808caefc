"""Who may serve a request at all. Each filter names why an endpoint is out.

Two kinds: hard ones (not ready, draining, prefill only, already tried), and preferences that yield
when they would leave nobody: a stale endpoint is better than none, and so is one whose engine will
answer with its own message about a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoy_router.endpoint import Endpoint, Knowledge, Role
from kvoy_router.request import InferenceRequest

Rejection = tuple[str, str]
"""(endpoint id, reason)"""
Filter = Callable[[Endpoint], str | None]
"""Why this endpoint is out; None keeps it."""

_PREFILL = Role.PREFILL
_LOST = Knowledge.LOST


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


def all_pass(
    endpoints: Sequence[Endpoint],
    request: InferenceRequest,
    exclude: frozenset[str],
    now_s: float,
    stale_after_s: float,
) -> bool:
    """Whether nothing that the filters above look for (`is_of` apart) speaks against any of these
    endpoints: the usual case, in one pass."""
    num_tokens = request.num_prompt_tokens + max(request.max_tokens or 1, 1)
    oldest_s = now_s - stale_after_s
    for endpoint in endpoints:
        load, info = endpoint.load, endpoint.info
        if load is None or info is None or endpoint.is_draining or load.draining or not load.ready:
            return False
        if info.role is _PREFILL or endpoint.load_s < oldest_s or endpoint.knowledge is _LOST:
            return False
        if info.max_model_len and num_tokens > info.max_model_len:
            return False
        if info.num_blocks and num_tokens > info.num_blocks * info.block_size:
            return False
        if exclude and endpoint.id in exclude:
            return False
    return bool(endpoints)


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
