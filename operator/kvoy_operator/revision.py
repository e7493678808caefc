"""Which engines a service's spec asks for, as a short name: the revision. Pure.

Two specs have one revision when they mean the same engine pods. Only what the user wrote counts,
by value: `8Gi` is `8192Mi`, `90s` is `1m30s`, and the order of keys means nothing. What the
operator adds (its images, its templates, a default that gets better) does not count, so that an
operator's upgrade makes no new revision. The names are kept in clusters and must never change
between versions; tests hold a table of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from pydantic.fields import FieldInfo

from kvoy_contract.names import RESTARTED_AT_ANNOTATION
from kvoy_operator.durations import Duration
from kvoy_operator.identity import REVISION_CHARS
from kvoy_operator.quantities import parse_quantity
from kvoy_operator.resources import LLMService
from kvoy_operator.spec_fields import IMPLIED, SpecModel
from kvoy_operator.spec_model import ModelSpec
from kvoy_operator.spec_pool import PoolSpec

Json: TypeAlias = Any
"""What `json` writes; a pod template's patch may hold anything."""

# As Kubernetes' own generated names: without vowels, so that no word comes out.
_ALPHABET: Final = "bcdfghjklmnpqrstvwxz2456789"

QUANTITY_FIELDS: Final = frozenset(
    {"shmSize", "size", "sizeLimit", "divisor", "requests", "limits"}
)
"""Names, in specs and in pod templates, whose value is a quantity or maps names to quantities."""
_NOTHING: Final[tuple[Json, ...]] = (None, "", {}, [])
POOL_FIELDS: Final = tuple(name for name in PoolSpec.model_fields if name != "replicas")


def revision_of(service: LLMService) -> str:
    """A few characters that stand for the engines that the service asks for."""
    text = json.dumps(intent_of(service), sort_keys=True, separators=(",", ":"))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    letters = []
    for _ in range(REVISION_CHARS):
        number, rest = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[rest])
    return "".join(letters)


def intent_of(service: LLMService) -> dict[str, Json]:
    """What the user wrote about the engine pods, in one form for all ways to write it.

    Left out: replica counts, the router, how a rollout goes, labels.
    """
    spec = service.spec
    given = {
        "model": _model_intent(service.model_name, spec.model),
        "engine": _normalize(spec.engine),
        "pools": {name: _pool_intent(pool) for name, pool in spec.pools.items()},
        "imagePullSecrets": _normalize(spec.image_pull_secrets),
        "drainTimeout": dict(_written_fields(spec.rollout)).get("drainTimeout"),
        "restartedAt": service.annotations.get(RESTARTED_AT_ANNOTATION),
    }
    return {name: value for name, value in given.items() if value not in _NOTHING}


def _model_intent(name: str, model: ModelSpec) -> dict[str, Json]:
    intent: dict[str, Json] = {"name": name, "reference": model.reference.rstrip("/")}
    fields = dict(_written_fields(model))
    for place in ("tokenSecretRef", "cache"):
        if place in fields:
            intent[place] = fields[place]
    if model.cache is not None and model.cache.pvc is not None:
        # Pods see the claim's name; its size may grow under them.
        intent["cache"] = {"pvc": model.cache.pvc.claim_name or ""}
    return intent


def _pool_intent(pool: PoolSpec) -> dict[str, Json]:
    aliases = {PoolSpec.model_fields[name].alias for name in POOL_FIELDS}
    return {alias: value for alias, value in _written_fields(pool) if alias in aliases}


def _written_fields(model: SpecModel) -> Iterator[tuple[str, Json]]:
    """The fields that the user wrote, by their names in YAML.

    The API server writes defaults that never change into every object: such a value is as good as
    left out. A default that may get better is not stored, so it counts once it is written.
    """
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if value is None or (value == field.default and not _is_implied(field)):
            continue
        if name not in model.model_fields_set or _is_empty(value, field):
            continue
        alias = field.alias or name
        yield alias, _normalize_named(alias, value)


def _is_implied(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and IMPLIED in extra


def _is_empty(value: object, field: FieldInfo) -> bool:
    """Whether it says as little as leaving the field out; `emptyDir: {}` says something."""
    if isinstance(value, SpecModel):
        return field.default is not None and not dict(_written_fields(value))
    return isinstance(value, tuple | Mapping) and not value


def _normalize(value: object) -> Json:
    if isinstance(value, SpecModel):
        return dict(_written_fields(value))
    if isinstance(value, Duration):
        return value.seconds
    if isinstance(value, Mapping):
        return {str(key): _normalize_named(str(key), inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_normalize(inner) for inner in value]
    return value


def _normalize_named(name: str, value: object) -> Json:
    if name not in QUANTITY_FIELDS:
        return _normalize(value)
    if isinstance(value, Mapping):
        return {str(key): _amount(inner) for key, inner in value.items()}
    return _amount(value)


def _amount(value: object) -> Json:
    """A quantity in plain digits; what is none (a null in a patch) as it stands."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return _normalize(value)
    try:
        return format(parse_quantity(value).normalize(), "f")
    except ValueError:
        return value
