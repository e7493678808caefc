"""A mark that says which Secrets an owner has been given. Pure.

They may not be read back, and a new operator would have to write all of them once more: so a digest
of them, as they were applied, is kept on the owner's first Service.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvoy_contract.names import API_GROUP
from kvoy_operator.identity import Manifest, fleet_secret_name, internal_secret_name
from kvoy_operator.kinds import SECRET, SERVICE
from kvoy_operator.observed import Body, ChildKey, Observed, child_key
from kvoy_operator.ownership import Ownership, ownership

_ANNOTATION: Final = f"{API_GROUP}/secrets"
"""Taking it away has the Secrets applied once more."""


@dataclass(frozen=True, slots=True)
class SecretMark:
    """Of one owner's Secrets, as they should be."""

    owner: str
    bearer: ChildKey | None
    """The Service; None: there is none, and they are applied each time."""
    digest: str

    @classmethod
    def of(cls, owner: Body, manifests: Sequence[Manifest]) -> SecretMark:
        secrets = [each for each in manifests if each["kind"] == SECRET.name]
        text = msgspec.json.encode(secrets, order="deterministic")
        bearers = [child_key(each) for each in manifests if each["kind"] == SERVICE.name]
        return cls(
            owner["metadata"]["name"],
            bearers[0] if bearers else None,
            hashlib.sha256(text).hexdigest()[:16],
        )

    def is_borne(self, owner: Body, observed: Observed) -> bool:
        live = observed.children.get(self.bearer) if self.bearer else None
        if live is None or ownership(live, owner) is not Ownership.OURS:
            return False
        annotations = live["metadata"].get("annotations") or {}
        is_marked = annotations.get(_ANNOTATION) == self.digest
        return is_marked and not self._is_one_missed(observed)

    def put_on(self, manifests: Iterable[Manifest]) -> list[Manifest]:
        """The manifests with the mark, for when the Secrets are applied."""
        return [self._mark(each) if child_key(each) == self.bearer else each for each in manifests]

    def _mark(self, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        annotations = {**metadata.get("annotations", {}), _ANNOTATION: self.digest}
        return {**manifest, "metadata": {**metadata, "annotations": annotations}}

    def _is_one_missed(self, observed: Observed) -> bool:
        """Whether some pod waits for a Secret of ours that somebody has deleted: none is
        watched."""
        names = (internal_secret_name, fleet_secret_name)
        ours = [f'secret "{name(self.owner)}"' for name in names]
        return any(
            name in container.waiting_message
            for pod in observed.pods
            for container in pod.containers
            for name in ours
        )
