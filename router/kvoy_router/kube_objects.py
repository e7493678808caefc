"""The parts of Kubernetes objects that a router looks at; everything else in them is skipped."""

from __future__ import annotations

import msgspec


class OwnerReference(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None

    @property
    def group(self) -> str:
        """Empty for the core group."""
        return self.api_version.rpartition("/")[0]


class ObjectMeta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    owner_references: list[OwnerReference] | None = None
    deletion_timestamp: str | None = None

    @property
    def controller(self) -> OwnerReference | None:
        """The one owner that manages the object."""
        for owner in self.owner_references or ():
            if owner.controller:
                return owner
        return None


class AnyObject(msgspec.Struct, frozen=True):
    metadata: ObjectMeta


class ContainerPort(msgspec.Struct, frozen=True, rename="camel"):
    container_port: int
    name: str = ""


class Container(msgspec.Struct, frozen=True):
    name: str = ""
    ports: list[ContainerPort] | None = None


class PodSpec(msgspec.Struct, frozen=True):
    containers: list[Container] = []


class PodStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    start_time: str = msgspec.field(name="startTime", default="")


class Pod(msgspec.Struct, frozen=True):
    metadata: ObjectMeta
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    next_page: str | None = msgspec.field(name="continue", default=None)


class PodList(msgspec.Struct, frozen=True):
    metadata: ListMeta
    items: list[Pod]


class Status(msgspec.Struct, frozen=True):
    """What the API says instead of an object."""

    code: int = 0
    message: str = ""
    reason: str = ""


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""
    object: msgspec.Raw
