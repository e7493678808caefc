"""`spec.model`: which model a service serves, and where its files are kept in the cluster."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field

from kvoy_operator.cel_rules import Rule, never_changes, only_grows, text_matches
from kvoy_operator.spec_fields import ObjectName, Quantity, SpecModel, fixed, implied

HUB_SCHEME: Final = "hf://"
CLAIM_SCHEME: Final = "pvc://"
FILE_SCHEME: Final = "file://"


class SecretKey(SpecModel):
    """One key of a Secret in the same namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: str = fixed(
        "token",
        "Key of the Secret that holds the token.",
        pattern=r"^[-._A-Za-z0-9]+$",
        min_length=1,
        max_length=253,
    )


class ClaimCache(SpecModel):
    """A PersistentVolumeClaim that exists, or one that the operator makes."""

    claim_name: ObjectName | None = implied(
        None, "An existing PersistentVolumeClaim to keep the model in. Leave out size with it."
    )
    size: Quantity | None = implied(
        None,
        "Makes a PersistentVolumeClaim of this size, which is deleted with the service. It can "
        "grow later, where the storage class allows that.",
    )
    storage_class: ObjectName | None = implied(
        None, "Storage class of the claim to make. Default: the cluster's own default."
    )
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = implied(
        "ReadWriteMany",
        "Access mode of the claim to make. ReadWriteOnce keeps every pod of the service on one "
        "node. Default: ReadWriteMany.",
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "",
            "model.cache.pvc: give either claimName (a claim that exists) or size (one to make)",
            "has(self.claimName) != has(self.size)",
            lambda pvc: (pvc.claim_name is None) != (pvc.size is None),
        ),
        Rule(
            "",
            "model.cache.pvc: storageClass and accessMode are for a claim to make; remove them "
            "beside claimName",
            "!has(self.claimName) || !has(self.storageClass) && !has(self.accessMode)",
            lambda pvc: (
                pvc.claim_name is None
                or not pvc.model_fields_set & {"storage_class", "access_mode"}
            ),
        ),
        only_grows(
            "size",
            "model.cache.pvc.size: a claim cannot shrink; remove the cache first, then add "
            "a smaller one",
        ),
        never_changes(
            "storageClass",
            "model.cache.pvc.storageClass: a claim cannot change it; remove the cache first, then "
            "add one of the other class",
        ),
        never_changes(
            "accessMode",
            "model.cache.pvc.accessMode: a claim cannot change it; remove the cache first, then "
            "add one with the other mode",
        ),
    )


class HostPathCache(SpecModel):
    """A folder of each node."""

    path: str = Field(
        description="Absolute path of a folder on the nodes, made where it is missing. Pods of "
        "other services may share it: each model is downloaded once per node.",
        pattern=r"^/[^\x00]*$",
        max_length=1024,
    )


class EmptyDirCache(SpecModel):
    """A folder that lives and goes with each pod."""

    size_limit: Quantity | None = implied(
        None, "Most bytes that the model's files may take on the node's disk. Default: no limit."
    )


class Cache(SpecModel):
    """Where a downloaded model is kept; at most one kind."""

    pvc: ClaimCache | None = implied(
        None, "A volume that all pods share: the model is downloaded once per cluster, by a Job."
    )
    host_path: HostPathCache | None = implied(
        None, "A folder of each node: the model is downloaded once per node, under a lock."
    )
    empty_dir: EmptyDirCache | None = implied(
        None, "A folder of each pod: every pod downloads the model when it starts."
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "",
            "model.cache: exactly one of pvc, hostPath and emptyDir; remove the others",
            "[has(self.pvc), has(self.hostPath), has(self.emptyDir)].filter(x, x).size() == 1",
            lambda cache: [cache.pvc, cache.host_path, cache.empty_dir].count(None) == 2,
        ),
    )


def _is_hub_or_has_no(attribute: str, field: str) -> Rule:
    return Rule(
        field,
        f"model.{field}: only for a model that is downloaded (uri: hf://...); remove it",
        f"!has(self.{field}) || self.uri.startsWith('{HUB_SCHEME}')",
        lambda model: getattr(model, attribute) is None or model.uri.startswith(HUB_SCHEME),
    )


class ModelSpec(SpecModel):
    """A model: where its files are, and its name in requests."""

    uri: str = Field(
        description="Where the model's files are. hf://ORG/NAME or hf://ORG/NAME@REVISION: on "
        "Hugging Face. pvc://CLAIM/FOLDER: a folder of a PersistentVolumeClaim in the same "
        "namespace. file:///FOLDER: a folder that the engine's container sees, in its image or in "
        "a volume of podTemplate.",
        min_length=1,
        max_length=1024,
    )
    name: str | None = implied(
        None,
        "The model's name in requests. Services that share one LLMRouter may share a name: the "
        "router splits the traffic between them. Default: the name of this object.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$",
        min_length=1,
        max_length=256,
    )
    revision: str | None = implied(
        None,
        "Commit, tag or branch of a model on Hugging Face. A commit makes every pod of every "
        "restart load the same files. Default: the branch main.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        min_length=1,
        max_length=256,
    )
    token_secret_ref: SecretKey | None = implied(
        None, "Secret with a Hugging Face token, for a gated or private model."
    )
    cache: Cache | None = implied(
        None,
        "Where a downloaded model is kept: one of pvc, hostPath and emptyDir. Default: emptyDir, "
        "so every pod downloads it.",
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        text_matches(
            "uri",
            "uri",
            r"^(hf|pvc|file)://",
            "model.uri: must begin with hf:// (Hugging Face), pvc:// (a PersistentVolumeClaim) or "
            "file:// (a folder in the engine's container)",
        ),
        text_matches(
            "uri",
            "uri",
            r"^([^h]|hf://[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(@[A-Za-z0-9_./-]+)?$)",
            "model.uri: a model on Hugging Face is hf://ORG/NAME or hf://ORG/NAME@REVISION",
        ),
        text_matches(
            "uri",
            "uri",
            r"^([^p]|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/]+)*/?$)",
            "model.uri: a model in a PersistentVolumeClaim is pvc://CLAIM/FOLDER",
        ),
        text_matches(
            "uri",
            "uri",
            r"^([^f]|file:///[^/])",
            "model.uri: a folder in the engine's container is file:///FOLDER, with three slashes",
        ),
        Rule(
            "uri",
            "model.uri: the folder must not contain '..'",
            "!self.uri.contains('/../') && !self.uri.endsWith('/..')",
            lambda model: "/../" not in model.uri and not model.uri.endswith("/.."),
        ),
        _is_hub_or_has_no("revision", "revision"),
        _is_hub_or_has_no("token_secret_ref", "tokenSecretRef"),
        _is_hub_or_has_no("cache", "cache"),
        Rule(
            "revision",
            "model.revision: model.uri names a revision after '@' already; remove one of the two",
            "!has(self.revision) || !self.uri.contains('@')",
            lambda model: model.revision is None or "@" not in model.uri,
        ),
    )

    @property
    def reference(self) -> str:
        """The uri with the revision in it, as `kvoy serve` takes it for a model on the hub."""
        return f"{self.uri}@{self.revision}" if self.revision else self.uri
