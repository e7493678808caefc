"""Series about who uses how much: a tenant is whose API key it is, so there are as many as the keys
file has."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter


class TenantMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["tenant", "model"]
        self._requests = Counter(
            "kvoy_router_tenant_requests",
            "Requests with an API key, by how they ended",
            [*labels, "outcome"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "kvoy_router_tenant_prompt_tokens",
            "Prompt tokens of answered requests",
            labels,
            registry=registry,
        )
        self._output_tokens = Counter(
            "kvoy_router_tenant_output_tokens",
            "Tokens of answers, as far as they were sent",
            labels,
            registry=registry,
        )
        self._unknown = Counter(
            "kvoy_router_unauthorized",
            "Requests without a valid API key",
            ["code"],
            registry=registry,
        )
        self._seen: set[tuple[str, str]] = set()
        self._outcomes: set[tuple[str, str, str]] = set()

    def on_request(
        self, tenant: str, model: str, outcome: str, prompt_tokens: int, output_tokens: int
    ) -> None:
        self._seen.add((tenant, model))
        self._outcomes.add((tenant, model, outcome))
        self._requests.labels(tenant, model, outcome).inc()
        self._prompt_tokens.labels(tenant, model).inc(prompt_tokens)
        self._output_tokens.labels(tenant, model).inc(output_tokens)

    def on_unauthorized(self, code: str) -> None:
        self._unknown.labels(code).inc()

    def keep_only(self, tenants: Collection[str]) -> None:
        """Series end with the tenant's last key."""
        self._forget({(t, m) for t, m in self._seen if t not in tenants})

    def forget_model(self, model: str) -> None:
        self._forget({(t, m) for t, m in self._seen if m == model})

    def _forget(self, gone: Collection[tuple[str, str]]) -> None:
        for labels in gone:
            self._seen.discard(labels)
            self._prompt_tokens.remove(*labels)
            self._output_tokens.remove(*labels)
        for tenant, model, outcome in [o for o in self._outcomes if o[:2] in gone]:
            self._outcomes.discard((tenant, model, outcome))
            self._requests.remove(tenant, model, outcome)
