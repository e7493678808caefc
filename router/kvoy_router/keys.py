"""API keys: who a client is, and what it may do. Pure; the file that they come from is elsewhere.

A key is `kvoy-<id>-<secret>`. Its id finds the entry, and the SHA-256 of the whole proves it: a
plain hash is enough for a secret of 256 random bits, and it is fast. Keys themselves are nowhere
here: not in the file, not in errors, not in logs."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from kvoy_contract.errors import Forbidden, Unauthorized

MAX_KEYS = 10_000
MAX_TENANTS = 1_000
"""Each tenant has metrics of its own."""

_KEY = re.compile(r"kvoy-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_NOBODY = bytes(32)

_Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{12}\Z")]
_Hash = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
_Tenant = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")]
_Priority = Annotated[int, Meta(ge=-1000, le=1000)]
_PerMinute = Annotated[int, Meta(ge=1, le=10**12)]
_Weight = Annotated[float, Meta(ge=0.01, le=1000.0)]
_Expiry = Annotated[datetime, Meta(tz=True)]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """One entry of the file."""

    id: _Id
    hash: _Hash
    tenant: _Tenant
    """Keys of one tenant share its part of the engines, and its cache."""
    priority: _Priority = 0
    """Of its requests, lower first. A request may ask to go later, never to go earlier."""
    weight: _Weight = 1.0
    """Of the tenant's part against that of others of its priority; equal in all of its keys."""
    requests_per_minute: _PerMinute | None = None
    """At each router replica; None: no limit."""
    tokens_per_minute: _PerMinute | None = None
    """Prompt and answer together, at each router replica; None: no limit."""
    models: tuple[str, ...] | None = None
    """That it may ask for; None: all."""
    expires: _Expiry | None = None
    shares_cache: bool = False
    """Its blocks are found by others whose keys say so too. Whoever shares can learn from the time
    of an answer what others have asked."""

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raises Forbidden."""
        if not self.allows(model):
            raise Forbidden(
                f"This API key may not use the model `{model[:200]}`.",
                param="model",
                code="model_not_allowed",
            )


class Keyring:
    """All keys of a router."""

    def __init__(self, keys: Iterable[Key]) -> None:
        """Raises ValueError where entries do not fit together."""
        self._keys: dict[str, Key] = {}
        weights: dict[str, float] = {}
        for key in keys:
            if key.id in self._keys:
                raise ValueError(f"keys: the id {key.id} twice")
            self._keys[key.id] = key
            if weights.setdefault(key.tenant, key.weight) != key.weight:
                raise ValueError(f"keys: {key.id}: weight: another one than in the tenant's others")
        if len(self._keys) > MAX_KEYS:
            raise ValueError(f"keys: more than {MAX_KEYS}")
        if len(weights) > MAX_TENANTS:
            raise ValueError(f"keys: tenant: more than {MAX_TENANTS} different ones")

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def by_id(self) -> Mapping[str, Key]:
        return self._keys

    @property
    def tenants(self) -> frozenset[str]:
        return frozenset(key.tenant for key in self._keys.values())

    def identify(self, authorization: bytes | None, now_unix_s: float) -> Key:
        """Whose request it is, by its `authorization` header. Raises Unauthorized."""
        scheme, _, shown = (authorization or b"").strip().partition(b" ")
        if scheme.lower() != b"bearer" or not shown.strip():
            raise Unauthorized(
                "An API key is needed: Authorization: Bearer <key>.", code="missing_api_key"
            )
        text = shown.strip().decode("latin-1")
        form = _KEY.fullmatch(text)
        key = self._keys.get(form[1]) if form else None
        expected = bytes.fromhex(key.hash.removeprefix("sha256:")) if key else _NOBODY
        # Compared also where there is no such id, so that the time tells nothing about ids.
        is_right = hmac.compare_digest(expected, hashlib.sha256(text.encode()).digest())
        if key is None or not is_right:
            raise Unauthorized("The API key is not valid.", code="invalid_api_key")
        if key.expires is not None and key.expires.timestamp() <= now_unix_s:
            raise Unauthorized("The API key has expired.", code="expired_api_key")
        return key


def new_key() -> tuple[str, str, str]:
    """A new random key, its id, and its hash as the file has it."""
    # A letter first: YAML would take twelve digits for a number.
    key_id = secrets.choice("abcdf") + secrets.token_hex(6)[1:]
    key = f"kvoy-{key_id}-{secrets.token_urlsafe(32)}"
    return key, key_id, f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def cache_salt(key: Key, client_salt: str | None) -> str | None:
    """The salt of a request's block hashes: the tenant's own, with the client's where it gave one.

    No tenant can find another's blocks, whatever salt it asks for, since its own name is always
    mixed in as the key of an HMAC.
    """
    if key.shares_cache:
        return client_salt
    secret = b"cache of tenant " + key.tenant.encode()
    return hmac.digest(secret, (client_salt or "").encode(), "sha256").hex()
