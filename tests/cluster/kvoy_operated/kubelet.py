"""Says of pods what a kubelet would: that they run and are ready, and that they have ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kvoy_cluster.api import MERGE_PATCH, Api, ApiError

_INTERVAL_S = 0.1


class PretendedKubelet:
    """Over the pods of one namespace, in a thread, until `stop`."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self.is_good: Callable[[dict[str, Any]], bool] = lambda pod: True
        """Which pods become ready; others stay as they were created."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pretended kubelet")
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            # Pods change and go while they are looked at; the next round sees what is there.
            with contextlib.suppress(ApiError, OSError):
                for pod in self._api.get(self._pods)["items"]:
                    self._tend(pod)

    def _tend(self, pod: dict[str, Any]) -> None:
        path = f"{self._pods}/{pod['metadata']['name']}"
        if "deletionTimestamp" in pod["metadata"]:
            self._api.request("DELETE", f"{path}?gracePeriodSeconds=0")
        elif not is_ready(pod) and self.is_good(pod):
            self._api.request("PATCH", f"{path}/status", {"status": ready_status(pod)}, MERGE_PATCH)


def is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def ready_status(pod: Mapping[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    return {
        "phase": "Running",
        "startTime": now,
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds
        ],
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": now}},
            }
            for container in pod["spec"]["containers"]
        ],
    }
