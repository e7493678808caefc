"""Which engines serve which model name, and whose name it is.

An engine serves the names that it tells, but a name that belongs to services is served by their
engines alone. Names are declared, come with services, or come with engines that belong to nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvoy_contract.errors import ModelNotFound, Unavailable
from kvoy_router import filters, split
from kvoy_router.endpoint import Endpoint
from kvoy_router.lineup import RETRY_AFTER_S, Lineups
from kvoy_router.model import Model
from kvoy_router.split import Service


class Catalogue:
    """The models of a pool. It tells the pool's line-ups who has come to a name, and who left."""

    def __init__(self, endpoints: Mapping[str, Endpoint], lineups: Lineups) -> None:
        """`endpoints`: all that the pool knows; looked at and never changed."""
        self.models: dict[str, Model] = {}
        """By name; perhaps one that no engine serves any more."""
        self._endpoints = endpoints
        self._lineups = lineups
        self._services: dict[str, Service] = {}

    def named(self, name: str) -> Model:
        """Raises ModelNotFound, or Unavailable while no engine has told its name yet."""
        model = self.models.get(name)
        if model is not None:
            return model
        if self._endpoints and all(e.info is None for e in self._endpoints.values()):
            raise Unavailable("No engine has reported yet.", retry_after_s=RETRY_AFTER_S)
        raise ModelNotFound(name)

    def names(self) -> list[str]:
        """That can be asked for: declared ones, and those that an engine serves."""
        return [name for name, model in self.models.items() if model.is_listed]

    def declare(self, name: str) -> None:
        self._called(name).is_declared = True

    def set_services(self, services: Iterable[Service]) -> None:
        """These and no others; names that nobody has any more are forgotten."""
        self._services = {service.name: service for service in services}
        for model in self.models.values():
            model.weights.clear()
        for service in self._services.values():
            self._called(service.model).weights[service.name] = service.weight
        for endpoint in self._endpoints.values():
            self.leave(endpoint)
            self.join(endpoint)
        self._drop_unlisted()

    def join(self, endpoint: Endpoint) -> None:
        """It serves what it tells from now on."""
        for name in self._names_of(endpoint):
            self._called(name).join(endpoint)
            self._lineups.join(name, endpoint)

    def leave(self, endpoint: Endpoint) -> None:
        """It serves nothing any more."""
        names: Iterable[str] = endpoint.info.model_names if endpoint.info else ()
        for name in names:
            model = self.models.get(name)
            if model is not None and model.leave(endpoint):
                self._lineups.leave(name, endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        """The pool knows it no longer."""
        self.leave(endpoint)
        if self._services:
            self._drop_unlisted()

    def on_describe(self, endpoint: Endpoint) -> None:
        """It describes itself otherwise than before, by the same names."""
        assert endpoint.info is not None
        for name in endpoint.info.model_names:
            if (model := self.models.get(name)) is not None:
                model.on_describe()

    def is_shared(self, name: str) -> bool:
        """Whether several services share the traffic of this model name."""
        model = self.models.get(name)
        return model is not None and len(model.weights) > 1

    def first_service(self, name: str, affinity: bytes) -> str:
        """The service that requests with this beginning fall to while one of its engines serves.

        Raises as `named`.
        """
        model = self.named(name)
        serving = filters.keep(model.endpoints, filters.is_serving(frozenset()), [])
        names = {endpoint.origin.service for endpoint in serving} or model.weights.keys()
        return split.order(model.weights, names, affinity)[0]

    def mismatch(self, endpoint: Endpoint) -> str | None:
        """See `split.mismatch`; None while the engine has told no names."""
        if endpoint.info is None:
            return None
        service = self._services.get(endpoint.origin.service)
        return split.mismatch(service, endpoint.info.model_names)

    def _called(self, name: str) -> Model:
        if name not in self.models:
            self.models[name] = Model(name)
        return self.models[name]

    def _drop_unlisted(self) -> None:
        """Names come and go with services: 404 for one that nobody has any more."""
        for name in [name for name, model in self.models.items() if not model.is_listed]:
            del self.models[name]
            self._lineups.drop_model(name)

    def _names_of(self, endpoint: Endpoint) -> Sequence[str]:
        """All that the engine tells, except those that belong to services other than its own."""
        if endpoint.info is None:
            return ()
        service = endpoint.origin.service
        owners = {
            name: model.weights.keys()
            for name in endpoint.info.model_names
            if (model := self.models.get(name)) is not None
        }
        return [
            name
            for name in endpoint.info.model_names
            if not service or not owners.get(name) or service in owners[name]
        ]
