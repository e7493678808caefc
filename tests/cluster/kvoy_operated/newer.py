"""`kvoy operator` of a later version, whose templates differ in what versions change: labels,
environment, probes, and a workload's own fields. Run as a module, it takes `kvoy`'s arguments.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from kvoy_operator import identity

VERSION_LABEL = "app.kubernetes.io/version"
VERSION = "9.9.9"
ADDED_VARIABLE = {"name": "KVOY_ADDED", "value": VERSION}
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")

Manifest = dict[str, Any]


def renewed(manifest: Manifest) -> Manifest:
    """The manifest as the later version renders it."""
    later = copy.deepcopy(manifest)
    for template in _templates(later):
        for container in template["spec"]["containers"]:
            container.setdefault("env", []).append(ADDED_VARIABLE)
            for name in _PROBES:
                if name in container:
                    container[name]["timeoutSeconds"] += 1
    if later["kind"] == "Deployment":
        later["spec"]["minReadySeconds"] = 1
    return later


def _templates(manifest: Manifest) -> Iterator[Manifest]:
    spec = manifest.get("spec", {})
    if "leaderWorkerTemplate" in spec:
        yield spec["leaderWorkerTemplate"]["leaderTemplate"]
        yield spec["leaderWorkerTemplate"]["workerTemplate"]
    elif "template" in spec:
        yield spec["template"]


def _with_version(labels: Callable[..., dict[str, str]]) -> Callable[..., dict[str, str]]:
    def labels_of(*args: Any, **kwargs: Any) -> dict[str, str]:
        return labels(*args, **kwargs) | {VERSION_LABEL: VERSION}

    return labels_of


def main() -> None:
    # Modules take what they need from others when they are imported: the patches come first.
    with patch.object(identity, "child_labels", _with_version(identity.child_labels)):
        from kvoy_operator import manifests
    workload, support = manifests.render_workload, manifests.render_support
    with (
        patch.object(manifests, "render_workload", lambda *args: renewed(workload(*args))),
        patch.object(
            manifests, "render_support", lambda *args: [renewed(each) for each in support(*args)]
        ),
    ):
        from kvoy_cli.__main__ import main as run_kvoy

        sys.exit(run_kvoy())


if __name__ == "__main__":
    main()
