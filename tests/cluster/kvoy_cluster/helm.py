"""The real helm, built like the cluster's other programs, with caches and settings of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvoy_cluster import build
from kvoy_cluster.folders import REPOSITORY
from kvoy_cluster.go_modules import HELM

CHART = REPOSITORY / "charts" / "kvoy"

Manifest = dict[str, Any]


class HelmError(Exception):
    """helm failed; the message has its error output."""


@dataclass(frozen=True, slots=True)
class Helm:
    home: Path
    """An empty folder for this run's caches and settings."""
    kubeconfig: Path | None = None
    """None: for what needs no cluster."""

    def run(self, *arguments: str | Path) -> str:
        """What helm prints. Raises HelmError."""
        environment = os.environ | {
            f"HELM_{kind}_HOME": str(self.home / kind.lower())
            for kind in ("CACHE", "CONFIG", "DATA")
        }
        if self.kubeconfig is not None:
            environment["KUBECONFIG"] = str(self.kubeconfig)
        done = subprocess.run(
            [build.build([HELM]).program("helm"), *arguments],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        if done.returncode != 0:
            raise HelmError(f"helm {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def render(
        self,
        values: Mapping[str, Any] | None = None,
        *flags: str,
        release: str = "kvoy",
        namespace: str = "kvoy-system",
    ) -> list[Manifest]:
        """What `helm template` makes of Kvoy's chart, hooks included. Raises HelmError."""
        file = self.write_values(values or {})
        chosen = ("--namespace", namespace, "--values", str(file), *flags)
        text = self.run("template", release, CHART, *chosen)
        return [manifest for manifest in yaml.safe_load_all(text) if manifest]

    def write_values(self, values: Mapping[str, Any]) -> Path:
        """A file for `--values`."""
        path = self.home / "values.yaml"
        path.write_text(yaml.safe_dump(dict(values)))
        return path


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one of that kind and name. Raises LookupError."""
    for manifest in manifests:
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name):
            return manifest
    raise LookupError(f"no {kind} {name}")
