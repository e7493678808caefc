"""Why a pod does not serve: one reason, and what its own message and experience say to do.

Reads what the kubelet, the scheduler and the engine have already said; asks nobody. The texts that
it looks for are Kubernetes' own and are held by tests word by word. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvoy_contract.names import MODEL_CACHE_COMPONENT
from kvoy_operator.observed import ContainerView, PodView, WorkloadView

MAX_QUOTED: Final = 600
"""Characters of somebody else's message that a condition repeats."""


class FailureReason(StrEnum):
    UNSCHEDULABLE = "Unschedulable"
    GPU_INSUFFICIENT = "GPUInsufficient"
    IMAGE_PULL = "ImagePull"
    CRASH_LOOP = "CrashLoop"
    OUT_OF_MEMORY = "OOMKilled"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    MODEL_FETCH_FAILED = "ModelFetchFailed"
    MISSING_SECRET = "MissingSecret"
    MISSING_CONFIG_MAP = "MissingConfigMap"
    MISSING_PVC = "MissingPVC"
    UNBOUND_PVC = "UnboundPVC"
    CONTAINER_CONFIG = "ContainerConfig"
    POD_SETUP_FAILED = "PodSetupFailed"
    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_SECURITY_FORBIDDEN = "PodSecurityForbidden"
    PODS_REFUSED = "PodsRefused"
    NODE_LOST = "NodeLost"
    EVICTED = "Evicted"
    WORKER_LOST = "WorkerLost"


_REMEDIES: Final = {
    FailureReason.UNSCHEDULABLE: "No node fits: add nodes, or ask for less in resources, "
    "nodeSelector, tolerations or topologyKey.",
    FailureReason.GPU_INSUFFICIENT: "No node has enough free devices: add GPU nodes, lower `gpus` "
    "or `replicas`, or correct `resourceName`.",
    FailureReason.IMAGE_PULL: "Check the image's name and tag, that the node reaches the "
    "registry, and imagePullSecrets.",
    FailureReason.CRASH_LOOP: "Read `kubectl logs --previous`.",
    FailureReason.OUT_OF_MEMORY: "Raise resources.limits.memory; shared memory (shmSize) counts "
    "too.",
    FailureReason.MODEL_LOAD_FAILED: "Check model.uri and model.revision, and that the model "
    "fits the device's memory.",
    FailureReason.MODEL_FETCH_FAILED: "Check model.uri, model.revision, model.tokenSecretRef and "
    "the size of model.cache.",
    FailureReason.MISSING_SECRET: "Create the Secret with that key in the service's namespace, or "
    "correct its name.",
    FailureReason.MISSING_CONFIG_MAP: "Create the ConfigMap with that key in the service's "
    "namespace, or correct its name.",
    FailureReason.MISSING_PVC: "Create the PersistentVolumeClaim in the service's namespace, or "
    "correct its name in model.uri, model.cache or podTemplate.",
    FailureReason.UNBOUND_PVC: "Nothing provides the volume: name a StorageClass that does "
    "(model.cache.pvc.storageClass, or the cluster's default) and an accessMode that it offers, or "
    "create a PersistentVolume.",
    FailureReason.CONTAINER_CONFIG: "Correct the container's settings in podTemplate or engine.",
    FailureReason.POD_SETUP_FAILED: "The node cannot set the pod up: correct the volumes of "
    "podTemplate, model.uri or model.cache, or repair the node's storage or network.",
    FailureReason.QUOTA_EXCEEDED: "Raise the namespace's ResourceQuota or ask for less.",
    FailureReason.POD_SECURITY_FORBIDDEN: "Use a namespace whose PodSecurity level allows it, or "
    "change podTemplate or model.cache.",
    FailureReason.PODS_REFUSED: "The API server refuses the pods: create what it misses, or "
    "correct in resources or podTemplate what it names.",
    FailureReason.NODE_LOST: "The node does not answer: repair or remove it.",
    FailureReason.EVICTED: "The node ran out of what it names: set requests, or use larger nodes.",
    FailureReason.WORKER_LOST: "The group starts again as a whole; read the worker's logs if it "
    "goes on.",
}

_IMAGE_REASONS: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_CONFIG_REASONS: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
SETUP_REASONS: Final = frozenset(
    {"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox"}
)
"""Of Events about pods, whose status does not say it; `stuck` brings them in."""
# What an engine or a fetch says in its termination message before it exits.
_SPOKEN: Final = {
    f"{reason}:": reason
    for reason in (
        FailureReason.MODEL_LOAD_FAILED,
        FailureReason.MODEL_FETCH_FAILED,
        FailureReason.WORKER_LOST,
    )
}
_MISSING: Final = (
    (
        re.compile(r"\bsecrets? \"|\bin Secret |non-existent secret key", re.IGNORECASE),
        FailureReason.MISSING_SECRET,
    ),
    (
        re.compile(r"\bconfigmaps? \"|\bin ConfigMap ", re.IGNORECASE),
        FailureReason.MISSING_CONFIG_MAP,
    ),
)
# A quota over requests or limits takes no pod that does not say its own.
_UNSAID: Final = re.compile(r"failed quota: .*must specify")
_SAY_IT: Final = (
    "Set what it names in resources, for routers in router.resources, or give the namespace a "
    "LimitRange with defaults."
)
_NO_VOLUME: Final = re.compile(
    r"unbound immediate PersistentVolumeClaims|find available persistent volumes to bind"
    r"|bound to non-existent pv"
)
_MISSING_CLAIM: Final = re.compile(r'persistentvolumeclaim "[^"]+" (not found|is being deleted)')
# An extended resource has a domain before its name, which cpu, memory and the like lack.
_NO_DEVICE: Final = re.compile(
    r"Insufficient (?!hugepages-)[a-z0-9.-]+/\S+|cannot allocate all claims"
)
_DEVICES_GONE: Final = "requested number of devices unavailable"


@dataclass(frozen=True, slots=True)
class Failure:
    reason: FailureReason
    subject: str
    """The pod's or workload's name."""
    message: str
    """Names the subject, repeats its own message and says what to do."""


def pod_failure(pod: PodView) -> Failure | None:
    """Why the pod does not serve; None for one that serves, is on its way, or is being deleted."""
    if pod.is_ready or pod.phase == "Succeeded":
        return None
    if pod.reason == "NodeLost":
        # Its deletion waits for a node that does not answer.
        return _failure(FailureReason.NODE_LOST, f"pod {pod.name}", pod.name, pod.message)
    if pod.is_terminating:
        return None
    found = _ended(pod) or _unplaced(pod) or _first_of_containers(pod)
    return _failure(found[0], f"pod {pod.name}", pod.name, found[1]) if found else None


def workload_failure(workload: WorkloadView) -> Failure | None:
    """Why the workload's controller cannot make its pods."""
    # The number of groups says nothing about their pods.
    is_made = workload.group_size == 1 and workload.current_replicas >= workload.replicas
    if not workload.failure_reason or is_made:
        return None
    text = workload.failure_message
    if "exceeded quota:" in text or "failed quota:" in text:
        reason = FailureReason.QUOTA_EXCEEDED
    elif "violates PodSecurity" in text:
        reason = FailureReason.POD_SECURITY_FORBIDDEN
    else:
        reason = FailureReason.PODS_REFUSED
    return _failure(reason, f"{workload.kind} {workload.name}", workload.name, text)


def first_failure(
    pods: Iterable[PodView], workloads: Iterable[WorkloadView] = ()
) -> Failure | None:
    """The failure to report: of the oldest pod that fails, and of pods that cannot even be made
    before all. Pods that have ended come last: others may have taken their place already."""
    refused = [failure for failure in map(workload_failure, workloads) if failure]
    if refused:
        return min(refused, key=lambda failure: failure.subject)
    pods = list(pods)
    ordered = sorted(pods, key=lambda pod: (pod.phase == "Failed", pod.created_s, pod.name))
    failures = (pod_failure(pod) or _lost_worker(pod, pods) for pod in ordered)
    return next((failure for failure in failures if failure), None)


def is_hopeless(pod: PodView) -> bool:
    """Whether the pod will hardly serve without help, however long one waits."""
    failure = pod_failure(pod)
    if failure is None:
        return False
    if failure.reason in (
        FailureReason.CRASH_LOOP,
        FailureReason.OUT_OF_MEMORY,
        FailureReason.MODEL_LOAD_FAILED,
    ):
        return max((each.restart_count for each in pod.containers), default=0) >= 3
    return failure.reason in (
        FailureReason.IMAGE_PULL,
        FailureReason.MISSING_SECRET,
        FailureReason.MISSING_CONFIG_MAP,
        FailureReason.MISSING_PVC,
        FailureReason.CONTAINER_CONFIG,
    )


def _ended(pod: PodView) -> tuple[FailureReason, str] | None:
    if pod.phase != "Failed":
        return None
    if pod.reason == "Evicted" or "low on resource" in pod.message:
        return FailureReason.EVICTED, pod.message
    if _DEVICES_GONE in pod.message:
        return FailureReason.GPU_INSUFFICIENT, pod.message
    if any(container.exit_code for container in pod.containers):
        return None
    return FailureReason.CRASH_LOOP, pod.message or pod.reason or "the pod has failed"


def _unplaced(pod: PodView) -> tuple[FailureReason, str] | None:
    if pod.unscheduled_since_s is None:
        return None
    text = pod.unscheduled_message
    if _MISSING_CLAIM.search(text):
        return FailureReason.MISSING_PVC, text
    if _NO_VOLUME.search(text):
        return FailureReason.UNBOUND_PVC, text
    if _NO_DEVICE.search(text):
        return FailureReason.GPU_INSUFFICIENT, text
    return FailureReason.UNSCHEDULABLE, text


def _first_of_containers(pod: PodView) -> tuple[FailureReason, str] | None:
    found = (_of_container(pod, each) for each in pod.containers if not each.is_ready)
    return next((failure for failure in found if failure), None)


def _of_container(pod: PodView, container: ContainerView) -> tuple[FailureReason, str] | None:
    if container.waiting_reason in _IMAGE_REASONS:
        return FailureReason.IMAGE_PULL, container.waiting_message or container.waiting_reason
    if container.waiting_reason in _CONFIG_REASONS | SETUP_REASONS:
        text = container.waiting_message or container.waiting_reason
        is_setup = container.waiting_reason in SETUP_REASONS
        otherwise = FailureReason.POD_SETUP_FAILED if is_setup else FailureReason.CONTAINER_CONFIG
        kinds = (reason for pattern, reason in _MISSING if pattern.search(text))
        return next(kinds, otherwise), text
    # The last exit code stays for good; once the container has started again, it is history.
    has_ended = bool(container.exit_code) and not container.is_started
    if container.waiting_reason == "CrashLoopBackOff" or has_ended:
        return _of_exit(pod, container)
    return None


def _of_exit(pod: PodView, container: ContainerView) -> tuple[FailureReason, str]:
    said = container.exit_message.strip()
    is_fetch = pod.component == MODEL_CACHE_COMPONENT
    for beginning, reason in _SPOKEN.items():
        # The message may be the end of a log: the line that matters need not be the first.
        line = next((line for line in said.splitlines() if line.startswith(beginning)), "")
        if line:
            # The same words as an engine's, which a memory that is too small would explain as well.
            is_load = reason is FailureReason.MODEL_LOAD_FAILED
            shown = FailureReason.MODEL_FETCH_FAILED if is_fetch and is_load else reason
            return shown, line.removeprefix(beginning).strip()
    code = f"container {container.name} exited with {container.exit_code}"
    if container.exit_reason == "OOMKilled":
        return FailureReason.OUT_OF_MEMORY, f"{code}, {container.restart_count} restarts"
    reason = FailureReason.MODEL_FETCH_FAILED if is_fetch else FailureReason.CRASH_LOOP
    last = said.splitlines()[-1] if said else container.exit_reason or container.waiting_message
    return reason, f"{code}, {container.restart_count} restarts: {last}"


def _lost_worker(pod: PodView, pods: Iterable[PodView]) -> Failure | None:
    """A leader that waits for a worker which is going away or has ended."""
    if pod.worker_index != 0 or pod.is_ready or pod.is_terminating:
        return None
    for other in pods:
        is_mate = (other.pool, other.revision, other.group_index) == (
            pod.pool,
            pod.revision,
            pod.group_index,
        )
        if is_mate and other.worker_index and (other.is_terminating or other.phase == "Failed"):
            text = f"its group has lost worker {other.name}"
            return _failure(FailureReason.WORKER_LOST, f"pod {pod.name}", pod.name, text)
    return None


def remedy_of(reason: FailureReason) -> str:
    """What to do, in a sentence."""
    return _REMEDIES[reason]


def quoted(text: str) -> str:
    """Somebody else's message on one line, cut to what a condition repeats."""
    own = " ".join(text.split())
    return own if len(own) <= MAX_QUOTED else own[: MAX_QUOTED - 1] + "…"


def _failure(reason: FailureReason, shown: str, subject: str, text: str) -> Failure:
    own = quoted(text)
    said = f"{shown}: {own}" if own else shown
    remedy = _SAY_IT if _UNSAID.search(text) else _REMEDIES[reason]
    return Failure(reason, subject, f"{said.rstrip('.')}. {remedy}")
