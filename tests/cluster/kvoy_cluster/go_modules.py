"""Which programs a test cluster is made of, and which Go module each of them comes from.

Each folder under `tests/cluster/go` has a committed go.mod and go.sum, which pin everything. Some
have a main package of their own; for the others it is the required module's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvoy_cluster.folders import GO_MODULES


@dataclass(frozen=True, slots=True)
class GoModule:
    name: str
    """Of its folder, and of the binary."""
    package: str
    """The main package to build; empty: only `keeps` is wanted."""
    requires: str = ""
    """The module whose version counts as this one's; empty: all sources are here."""
    links: tuple[str, ...] = ()
    """Further names of the binary, which acts by the name it is called by."""
    stamps: tuple[str, ...] = ()
    """String variables that the linker sets; `{version}` and `{minor}` are filled in."""
    keeps: Mapping[str, str] = field(default_factory=dict)
    """Files of the required module to keep beside the binary: path in the module -> name."""

    @property
    def folder(self) -> Path:
        return GO_MODULES / self.name

    @property
    def version(self) -> str:
        """Of the required module, as `v1.2.3`. Raises LookupError if go.mod does not say."""
        if not self.requires:
            return "v0"
        text = (self.folder / "go.mod").read_text()
        found = re.search(rf"^(?:require)?\s+{re.escape(self.requires)} (v\S+)", text, re.MULTILINE)
        if found is None:
            raise LookupError(f"{self.folder / 'go.mod'} requires no {self.requires}")
        return found[1]

    @property
    def go_version(self) -> str:
        """The least version of Go, as go.mod demands it."""
        found = re.search(r"^go (\S+)$", (self.folder / "go.mod").read_text(), re.MULTILINE)
        if found is None:
            raise LookupError(f"{self.folder / 'go.mod'} names no version of Go")
        return found[1]

    def linker_flags(self) -> str:
        version = self.version
        _, _, rest = version.partition(".")
        minor = rest.partition(".")[0]
        stamps = (stamp.format(version=version, minor=minor) for stamp in self.stamps)
        return " ".join(["-s", "-w", *(f"-X {stamp}" for stamp in stamps)])

    def key(self, toolchain: str) -> str:
        """Equal for equal binaries: a hash of all sources, flags, and the version of Go."""
        digest = hashlib.sha256()
        for part in (toolchain, self.package, self.linker_flags(), repr((self.links, self.keeps))):
            digest.update(part.encode() + b"\0")
        for file in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            digest.update(str(file.relative_to(self.folder)).encode() + b"\0")
            digest.update(file.read_bytes() + b"\0")
        return digest.hexdigest()[:16]


KUBE = GoModule(
    name="kube",
    package=".",
    requires="k8s.io/kubernetes",
    links=(
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubelet",
        "kube-proxy",
        "kubectl",
    ),
    stamps=(
        "k8s.io/component-base/version.gitVersion={version}",
        "k8s.io/component-base/version.gitMajor=1",
        "k8s.io/component-base/version.gitMinor={minor}",
        "k8s.io/component-base/version.gitTreeState=clean",
        "k8s.io/client-go/pkg/version.gitVersion={version}",
    ),
)
ETCD = GoModule("etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3")
LWS = GoModule(
    name="lws",
    package="sigs.k8s.io/lws/cmd",
    requires="sigs.k8s.io/lws",
    keeps={
        "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml": "crd.yaml",
        "config/webhook/manifests.yaml": "webhooks.yaml",
    },
)
COREDNS = GoModule("coredns", ".", "github.com/coredns/coredns")
HELM = GoModule("helm", "helm.sh/helm/v4/cmd/helm", "helm.sh/helm/v4")
PROBE = GoModule("probe", ".")
_MONITORING_KINDS = ("podmonitors", "prometheusrules", "servicemonitors")
PROMETHEUS_OPERATOR = GoModule(
    name="prometheus-operator",
    package="",
    requires="github.com/prometheus-operator/prometheus-operator",
    keeps={
        f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml": f"{kind}.yaml"
        for kind in _MONITORING_KINDS
    },
)
"""Its custom resources alone."""

ALL_MODULES = (PROBE, PROMETHEUS_OPERATOR, ETCD, COREDNS, LWS, HELM, KUBE)
