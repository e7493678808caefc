"""Who a request is from, and what that makes of it: tenant, priority, cache salt.

With API keys the key decides everything, and no request goes on without one. Without keys the
headers of llm-d's gateways say a tenant and an objective: they share out an open service, and
protect nobody. Neither keys nor these headers reach an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from kvoy_contract.errors import BadRequest
from kvoy_router.http_message import Headers, Request
from kvoy_router.keys import Key, Keyring, cache_salt

FAIRNESS_HEADERS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
OBJECTIVE_HEADERS = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
"""The names of today and of before."""
_AUTHORIZATION = b"authorization"
_NAME = re.compile(rb"[!-~]{1,128}")


class Client(msgspec.Struct, frozen=True, gc=False):
    """Whoever sent a request, as far as routing goes."""

    tenant: str = ""
    priority: int | None = None
    """What its key or its objective says; None: the request decides."""
    weight: float = 1.0
    key: Key | None = None

    def check_model(self, model: str) -> None:
        """Raises Forbidden."""
        if self.key is not None:
            self.key.check_model(model)

    def allows(self, model: str) -> bool:
        return self.key is None or self.key.allows(model)

    def priority_of(self, asked: int) -> int:
        """Of a request whose body asks for this one. With a key it can only ask to go later."""
        if self.priority is None:
            return asked
        return self.priority + max(asked, 0) if self.key is not None else self.priority

    def salt_of(self, asked: str | None) -> str | None:
        return asked if self.key is None else cache_salt(self.key, asked)


ANYBODY = Client()


class Access:
    """`keyring` is None where no keys are asked for. It and `objectives` are replaced by whoever
    watches their files."""

    def __init__(
        self,
        keyring: Keyring | None,
        objectives: Mapping[str, int],
        now_unix_s: Callable[[], float],
    ) -> None:
        """`objectives`: names, as in a header, and the priorities that they stand for."""
        self.keyring = keyring
        self.objectives = objectives
        self._now_unix_s = now_unix_s

    def identify(self, request: Request) -> Client:
        """Whose request it is; its key is taken out of it. Raises Unauthorized or BadRequest."""
        if self.keyring is None:
            return self._by_headers(request)
        key = self.keyring.identify(request.header(_AUTHORIZATION), self._now_unix_s())
        request.headers = [header for header in request.headers if header[0] != _AUTHORIZATION]
        return Client(tenant=key.tenant, priority=key.priority, weight=key.weight, key=key)

    def check_key(self, headers: Headers) -> None:
        """Of a request whose body has not come. Raises Unauthorized."""
        if self.keyring is not None:
            shown = next((value for name, value in headers if name == _AUTHORIZATION), None)
            self.keyring.identify(shown, self._now_unix_s())

    def _by_headers(self, request: Request) -> Client:
        tenant = _named(request, FAIRNESS_HEADERS)
        objective = _named(request, OBJECTIVE_HEADERS)
        if tenant is None and objective is None:
            return ANYBODY
        priority = None if objective is None else self.objectives.get(objective, 0)
        return Client(tenant=tenant or "", priority=priority)


def _named(request: Request, names: tuple[bytes, ...]) -> str | None:
    """Raises BadRequest for a value that is no name."""
    for name in names:
        value = request.header(name)
        if value is not None:
            if not _NAME.fullmatch(value):
                raise BadRequest(
                    f"The header {name.decode()} must have 1 to 128 printable characters."
                )
            return value.decode("ascii")
    return None


def with_client(body: bytes, salt: str | None, priority: int | None) -> bytes:
    """A request's body with the salt and the priority that count for its engine; None leaves the
    field out. All else stays byte for byte as the client wrote it."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, value in (("cache_salt", salt), ("priority", priority)):
        fields.pop(name, None)
        if value is not None:
            fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)
