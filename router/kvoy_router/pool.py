"""All engines that this router knows, by model, and the pick of one of them for a request.

Owns endpoints, the prefix index, assumed blocks and leases. Telemetry and discovery tell it what
happens, dispatch asks it to pick. It does no I/O and has no clock: `now_s` comes with every call,
from any clock that does not run backwards. One thread owns it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvoy_router.assumed import Assumed
from kvoy_router.audit import predicted_ttft_s
from kvoy_router.catalogue import Catalogue
from kvoy_router.cost import Traffic
from kvoy_router.decision import Decision
from kvoy_router.endpoint import Endpoint, EngineInfo, Knowledge, LoadView, Origin
from kvoy_router.lease import Lease, Ledger
from kvoy_router.lineup import Lineups
from kvoy_router.policies import KvAware, Policy, View, is_new_to_all
from kvoy_router.prefix_index import Hashes, PrefixIndex, keys_of
from kvoy_router.request import InferenceRequest
from kvoy_router.split import Service

MAX_REMEMBERED_NUMBERS = 10_000
"""Addresses of removed engines whose request numbers go on when they come back."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    stale_after_s: float = 5.0
    """Engines report at least each second; after five silent ones a report is not believed."""
    max_index_entries: int = 16_000_000
    """About 2 GB if ever reached; an engine of 300,000 KV tokens puts 5,000 in."""
    max_reports_per_s: float = 2_000.0
    """That engines are asked to send together; each costs a tenth of a millisecond."""

    def __post_init__(self) -> None:
        if not self.max_reports_per_s >= 1:
            raise ValueError(f"max_reports_per_s: must be at least 1, not {self.max_reports_per_s}")


class Pool:
    def __init__(
        self,
        router_id: str,
        policy: Policy | None = None,
        *,
        config: PoolConfig | None = None,
        random: Random | None = None,
    ) -> None:
        self.router_id = router_id
        self.config = config or PoolConfig()
        self.num_reports = 0
        """Load reports that have come."""
        random = random or Random()
        self.policy: Policy = policy or KvAware(random)
        self.index = PrefixIndex(self.config.max_index_entries)
        self.assumed = Assumed()
        self._lineups = Lineups(
            self.policy, self.index, self.assumed, random, self.config.stale_after_s
        )
        self._endpoints: dict[str, Endpoint] = {}
        self.catalogue = Catalogue(self._endpoints, self._lineups)
        self._last_numbers: dict[str, int] = {}
        self._num_picks = 0

    def use_policy(self, policy: Policy) -> None:
        """Choose by it from now on; what is known of engines stays."""
        self.policy = policy
        self._lineups.use_policy(policy)

    # What there is

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        return tuple(self._endpoints.values())

    @property
    def num_endpoints(self) -> int:
        return len(self._endpoints)

    def endpoint(self, endpoint_id: str) -> Endpoint | None:
        return self._endpoints.get(endpoint_id)

    def models(self) -> list[str]:
        """Names that can be asked for: declared ones, and those that an engine serves."""
        return self.catalogue.names()

    def endpoints_of(self, model: str) -> Sequence[Endpoint]:
        """Raises ModelNotFound, or Unavailable while no engine has told its name yet."""
        return tuple(self.catalogue.named(model).endpoints)

    def usual_info(self, model: str, service: str | None = None) -> EngineInfo | None:
        """How the model's engines, or one service's of them, hash and tokenise, as most of them do;
        None while none of them has said. Raises as `endpoints_of`."""
        return self.catalogue.named(model).usual_info(service)

    def output_tokens(self, model: str) -> float:
        """Expected length of an answer. Raises as `endpoints_of`."""
        return self.catalogue.named(model).output_tokens

    def traffic(self, request: InferenceRequest) -> Traffic:
        """What the pool has learnt of requests like this one. Raises as `endpoints_of`."""
        return self.catalogue.named(request.model).traffic(request)

    def describe_endpoints(self, now_s: float) -> list[dict[str, Any]]:
        """For `/debug/engines`."""
        return [e.to_dict(now_s, self.index.num_held(e.slot)) for e in self._endpoints.values()]

    # Discovery

    def declare_model(self, name: str) -> None:
        """The model belongs to this router even while no engine serves it: 503, not 404."""
        self.catalogue.declare(name)

    def set_services(self, services: Iterable[Service]) -> None:
        """These and no others. Each one's model belongs to this router even while no engine serves
        it; a name that nobody has any more is forgotten."""
        self.catalogue.set_services(services)

    def add_endpoint(
        self, address: str, telemetry_address: str = "", origin: Origin | None = None
    ) -> Endpoint:
        """Its id is its address; adding it again changes nothing."""
        known = self._endpoints.get(address)
        if known is not None:
            return known
        ledger = Ledger(self._last_numbers.pop(address, 0))
        endpoint = Endpoint(address, telemetry_address, self.index.add_slot(), ledger, origin)
        self._endpoints[address] = endpoint
        self._lineups.watch(endpoint)
        return endpoint

    def remove_endpoint(self, endpoint_id: str) -> None:
        """Its open leases stay valid and are released as always."""
        endpoint = self._endpoints.pop(endpoint_id, None)
        if endpoint is None:
            return
        self.catalogue.remove(endpoint)
        self.assumed.drop_all(endpoint.slot)
        self.index.forget(endpoint.slot)
        self._lineups.forget(endpoint)
        self._last_numbers[endpoint_id] = endpoint.ledger.last_number
        if len(self._last_numbers) > MAX_REMEMBERED_NUMBERS:
            del self._last_numbers[next(iter(self._last_numbers))]

    def set_draining(self, endpoint_id: str, is_draining: bool) -> None:
        """Discovery's word that an engine is to get nothing new."""
        if endpoint := self._endpoints.get(endpoint_id):
            endpoint.is_draining = is_draining
            self._lineups.mark(endpoint)

    # Telemetry. Events of an endpoint that has been removed are ignored.

    def on_describe(self, endpoint_id: str, info: EngineInfo, now_s: float) -> None:
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            return
        before = endpoint.info
        is_new = before is None or before.epoch != info.epoch
        if before is not None and is_new:
            self._forget_blocks(endpoint)
            endpoint.restart()
        if is_new or before is None or before.model_names != info.model_names:
            self.catalogue.leave(endpoint)
            endpoint.info = info
            self.catalogue.join(endpoint)
        elif before != info:
            self.catalogue.on_describe(endpoint)
        endpoint.info = info
        self._lineups.mark(endpoint)

    def on_snapshot_begin(self, endpoint_id: str, now_s: float) -> None:
        if endpoint := self._endpoints.get(endpoint_id):
            self._forget_blocks(endpoint)
            endpoint.knowledge = Knowledge.SYNCING
            self._lineups.mark(endpoint)

    def on_snapshot_chunk(self, endpoint_id: str, hashes: Hashes, now_s: float) -> None:
        if endpoint := self._endpoints.get(endpoint_id):
            self.index.store(endpoint.slot, keys_of(hashes))

    def on_snapshot_end(self, endpoint_id: str, now_s: float) -> None:
        if endpoint := self._endpoints.get(endpoint_id):
            endpoint.knowledge = Knowledge.EXACT

    def on_blocks(
        self,
        endpoint_id: str,
        removed: Hashes,
        stored: Hashes,
        cleared: bool,
        now_s: float,
    ) -> None:
        """Apply a delta in the contract's order: cleared, removed, stored."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            return
        if cleared:
            self._forget_blocks(endpoint)
        if removed:
            keys = keys_of(removed)
            self.index.remove(endpoint.slot, keys)
            self.assumed.drop(endpoint.slot, keys)
        if stored:
            keys = keys_of(stored)
            self.index.store(endpoint.slot, keys)
            self.assumed.drop(endpoint.slot, keys)

    def on_load(self, endpoint_id: str, load: LoadView, now_s: float) -> None:
        self.num_reports += 1
        if endpoint := self._endpoints.get(endpoint_id):
            endpoint.take_load(load, now_s)
        self.index.sweep()
        self.assumed.expire(now_s)

    def on_lost(self, endpoint_id: str, now_s: float) -> None:
        """The telemetry stream broke or had a gap: nothing about this engine is known any more."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None or endpoint.knowledge is Knowledge.LOST:
            return
        self._forget_blocks(endpoint)
        endpoint.forget_load()
        endpoint.knowledge = Knowledge.LOST
        self._lineups.mark(endpoint)

    # The pick

    def pick(
        self, request: InferenceRequest, now_s: float, exclude: frozenset[str] = frozenset()
    ) -> Decision:
        """Choose an engine and reserve the request's load there.

        Raises ModelNotFound, ContextLengthExceeded, or Unavailable when no engine may serve it.
        """
        model = self.catalogue.named(request.model)
        keys = keys_of(request.hashes)
        self.assumed.expire(now_s)
        lineup = self._lineups.of(model, self.catalogue.models, request, keys, now_s, exclude)
        views = lineup.views
        best_cached_tokens = max(view.cached_tokens for view in views)
        position, candidates = self.policy.choose(request, views, lineup.traffic)
        cost = candidates[position].cost
        model.learn_prompt(best_cached_tokens, request.num_prompt_tokens)
        view = views[position]
        depth = lineup.depth_at(view.endpoint.slot)
        self.index.touch(keys[:depth])
        in_turn = lineup.depth_at(model.next_in_turn().slot) * request.stride
        lease = self._lease(view, request, keys[depth:], now_s)
        lease.is_home = is_new_to_all(request.num_prompt_tokens, views)
        model.homes.count(view.endpoint.id, is_new=lease.is_home)
        return Decision(
            request_id=request.request_id,
            model=request.model,
            policy=self.policy.name,
            endpoint=view.endpoint,
            lease=lease,
            cached_tokens=view.cached_tokens,
            best_cached_tokens=best_cached_tokens,
            now_s=now_s,
            prompt_tokens=request.num_prompt_tokens,
            stride=request.stride,
            predicted_ttft_s=predicted_ttft_s(request, view, lineup.traffic, cost),
            cached_tokens_in_turn=min(in_turn, request.num_prompt_tokens),
            candidates=candidates,
            rejected=tuple(lineup.rejected),
        )

    def is_shared(self, model: str) -> bool:
        """Whether several services share the traffic of this model name."""
        return self.catalogue.is_shared(model)

    def first_service(self, model: str, affinity: bytes) -> str:
        """The service that requests with this beginning fall to while one of its engines serves.

        Raises as `endpoints_of`.
        """
        return self.catalogue.first_service(model, affinity)

    def mismatch(self, endpoint_id: str) -> str | None:
        """See `split.mismatch`."""
        endpoint = self._endpoints.get(endpoint_id)
        return None if endpoint is None else self.catalogue.mismatch(endpoint)

    def check_integrity(self) -> None:
        self.index.check_integrity()
        for endpoint in self._endpoints.values():
            endpoint.ledger.check_integrity()
        self._lineups.check_integrity()

    def _lease(
        self, view: View, request: InferenceRequest, new_keys: Sequence[int], now_s: float
    ) -> Lease:
        endpoint = view.endpoint
        self._num_picks += 1
        endpoint.last_pick = self._num_picks
        self.assumed.claim(endpoint.slot, new_keys)
        return Lease(
            endpoint,
            request.model,
            cached_tokens=view.cached_tokens,
            prefill_tokens=max(request.num_prompt_tokens - view.cached_tokens, 1),
            context_tokens=request.num_prompt_tokens * request.num_choices,
            assumed_keys=new_keys,
            now_s=now_s,
            on_release=self._on_release,
        )

    def _on_release(self, lease: Lease, now_s: float, output_tokens: int | None) -> None:
        computed = lease.first_token_s is not None
        if lease.assumed_keys and lease.slot == lease.endpoint.slot:
            if computed:
                self.assumed.drop_later(lease.slot, lease.assumed_keys, now_s)
            else:
                self.assumed.drop(lease.slot, lease.assumed_keys)
        model = self.catalogue.models.get(lease.model)
        if computed and model is not None:
            model.learn_output(lease, now_s, output_tokens)
        elif lease.is_home and model is not None:
            model.homes.take_back(lease.endpoint.id)

    def _forget_blocks(self, endpoint: Endpoint) -> None:
        self.assumed.drop_all(endpoint.slot)
        self.index.forget(endpoint.slot)
        endpoint.slot = self.index.add_slot()
        endpoint.num_resets += 1
        self._lineups.mark(endpoint)
