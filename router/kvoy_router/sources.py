"""Where this router's engines and services come from: lists, files, and Kubernetes, together.

Joins discoveries to the pool and the telemetry clients; decides nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path

from kvoy_contract import fleet as fleets
from kvoy_router.config import EngineAddress, RouterConfig
from kvoy_router.discovery import Discovery
from kvoy_router.endpoint import Knowledge, Origin
from kvoy_router.fleet import Fleet
from kvoy_router.fleet_file import FleetFile
from kvoy_router.found import FoundEngine
from kvoy_router.metrics import Metrics
from kvoy_router.pool import Pool
from kvoy_router.split import Service

SETTLE_S = 15.0
"""So long a new router waits for the first word of the engines that it has found."""
_SPOKEN = (Knowledge.EXACT, Knowledge.LOST)


class Sources:
    def __init__(
        self,
        config: RouterConfig,
        pool: Pool,
        fleet: Fleet,
        metrics: Metrics,
        now_s: Callable[[], float],
    ) -> None:
        """Raises NoClusterError when Kubernetes is to be asked and there is none."""
        self._pool = pool
        self._fleet = fleet
        self._metrics = metrics
        self._now_s = now_s
        self._is_settled = False
        self._first_pods_s: float | None = None
        """When the pods were known first."""
        self._listed_origin = Origin(secret=config.secret)
        self._listed: Sequence[FoundEngine] = ()
        self._pods: Sequence[FoundEngine] = ()
        self._services: Sequence[fleets.FleetService] = ()
        self.listed = Discovery(
            config.engines,
            Path(config.engines_file) if config.engines_file else None,
            self._on_listed,
        )
        self.fleet_file: FleetFile | None = None
        if config.kubernetes and config.fleet_file is not None:
            # Not loaded where it is not used: it costs a second and 25 MB.
            from kvoy_router import kube_api
            from kvoy_router.kube_discovery import KubeDiscovery

            cluster = kube_api.load_config()
            self._kubernetes = KubeDiscovery(
                config.kubernetes_namespace or cluster.namespace,
                lambda: kube_api.open_api(kube_api.load_config()),
                self._on_pods,
                self._is_lost,
                now_s,
            )
            self.fleet_file = FleetFile(Path(config.fleet_file), self._on_fleet)

    def runs(self) -> Iterator[tuple[str, Coroutine[None, None, None]]]:
        """Name and coroutine of each task that keeps all this going."""
        yield "discovery", self.listed.run()
        if self.fleet_file is not None:
            yield "fleet file", self.fleet_file.run()
            yield "kubernetes", self._kubernetes.run()

    def unready_reason(self) -> str | None:
        """In a cluster a router is ready once it knows what there is, even if that is no engine:
        else nobody could tell a missing engine from a missing router. It stays so."""
        if self.fleet_file is not None:
            reason = None if self._is_settled else self._unsettled_reason(self.fleet_file)
            self._is_settled = reason is None
            return reason
        if any(endpoint.is_routable for endpoint in self._pool.endpoints):
            return None
        return "no engine can be routed to"

    def _unsettled_reason(self, fleet_file: FleetFile) -> str | None:
        if not fleet_file.was_read:
            return "the fleet file has not been read"
        if self._first_pods_s is None:
            return "pods have not been listed"
        # A router that takes over from another one must not answer 503 for engines that serve.
        is_known = self._kubernetes.has_verified and all(
            endpoint.knowledge in _SPOKEN for endpoint in self._pool.endpoints
        )
        if is_known or self._now_s() - self._first_pods_s > SETTLE_S:
            return None
        return "engines have not reported yet"

    @property
    def has_kubernetes(self) -> bool | None:
        """Whether the API answers; None where it is not used."""
        if self.fleet_file is None:
            return None
        return self._kubernetes.has_listed and self._kubernetes.error is None

    @property
    def has_fleet(self) -> bool | None:
        """Whether the fleet file is good; None where there is none."""
        if self.fleet_file is None:
            return None
        return self.fleet_file.was_read and self.fleet_file.error is None

    def _on_listed(self, engines: Sequence[EngineAddress]) -> None:
        self._listed = [FoundEngine(engine, self._listed_origin) for engine in engines]
        self._apply()

    def _on_pods(self, engines: Sequence[FoundEngine]) -> None:
        self._pods = engines
        if self._first_pods_s is None:
            self._first_pods_s = self._now_s()
        self._apply()

    def _apply(self) -> None:
        known = {engine.address.http for engine in self._listed}
        pods = [engine for engine in self._pods if engine.address.http not in known]
        self._fleet.apply([*self._listed, *pods])

    def _on_fleet(self, fleet: fleets.Fleet) -> None:
        before, self._services = self._services, fleet.services
        # First whose engines these are, so that those of a gone service are out of its model.
        self._kubernetes.set_fleet(fleet)
        self._pool.set_services(
            Service(name=service.name, model=service.model, weight=service.weight)
            for service in fleet.services
        )
        for name in {s.name for s in before} - {s.name for s in fleet.services}:
            self._metrics.forget_service(name)
        for model in {s.model for s in before} - set(self._pool.models()):
            self._metrics.forget_model(model)

    def _is_lost(self, endpoint_id: str) -> bool:
        endpoint = self._pool.endpoint(endpoint_id)
        return endpoint is None or endpoint.knowledge is Knowledge.LOST
