"""The texts here are what Kubernetes 1.37 and containerd say, word by word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoy_operator.failures import FailureReason, first_failure, is_hopeless, pod_failure
from kvoy_operator.observed import ContainerView, PodView, WorkloadView

POD = PodView(
    name="qwen-s-bcdfgh-7d4f8-abcde",
    component="engine",
    pool="serving",
    revision="bcdfgh",
    phase="Pending",
    is_ready=False,
    is_terminating=False,
    created_s=100.0,
)
ENGINE = ContainerView("engine", is_ready=False, restart_count=0, is_started=False)


def _unplaced(message: str) -> PodView:
    return replace(POD, unscheduled_since_s=101.0, unscheduled_message=message)


def _waiting(reason: str, message: str = "") -> PodView:
    engine = replace(ENGINE, waiting_reason=reason, waiting_message=message)
    return replace(POD, node="n1", scheduled_s=101.0, containers=(engine,))


def _exited(message: str = "", *, code: int = 1, reason: str = "Error") -> PodView:
    engine = replace(
        ENGINE,
        restart_count=4,
        waiting_reason="CrashLoopBackOff",
        waiting_message="back-off 1m20s restarting failed container=engine pod=qwen",
        exit_code=code,
        exit_reason=reason,
        exit_message=message,
    )
    return replace(POD, phase="Running", node="n1", scheduled_s=101.0, containers=(engine,))


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (
            _unplaced(
                "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu. "
                "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
            ),
            "Unschedulable",
        ),
        (
            _unplaced(
                "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector. "
                "preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling."
            ),
            "Unschedulable",
        ),
        (_unplaced("0/1 nodes are available: 1 Insufficient hugepages-2Mi."), "Unschedulable"),
        (
            _unplaced(
                "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are "
                "available: 2 No preemption victims found for incoming pod."
            ),
            "GPUInsufficient",
        ),
        (
            _unplaced(
                "0/2 nodes are available: 1 Insufficient cpu, 1 Insufficient example.com/npu."
            ),
            "GPUInsufficient",
        ),
        (
            _unplaced("0/2 nodes are available: 2 cannot allocate all claims."),
            "GPUInsufficient",
        ),
        (
            _unplaced(
                '0/2 nodes are available: persistentvolumeclaim "models" not found. preemption: '
                "0/2 nodes are available: 2 Preemption is not helpful for scheduling."
            ),
            "MissingPVC",
        ),
        (_unplaced('persistentvolumeclaim "models" is being deleted'), "MissingPVC"),
        (
            _unplaced(
                "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not "
                "found"
            ),
            "UnboundPVC",
        ),
        (
            _unplaced(
                "0/2 nodes are available: 2 node(s) didn't find available persistent volumes to "
                "bind."
            ),
            "UnboundPVC",
        ),
        (
            _waiting(
                "ErrImagePull",
                'failed to pull and unpack image "example.com/engine:1": failed to resolve '
                "reference: example.com/engine:1: not found",
            ),
            "ImagePull",
        ),
        (
            _waiting("ImagePullBackOff", 'Back-off pulling image "example.com/engine:1"'),
            "ImagePull",
        ),
        (
            _waiting(
                "ErrImageNeverPull",
                'Container image "engine:1" is not present with pull policy of Never',
            ),
            "ImagePull",
        ),
        (_waiting("InvalidImageName", "couldn't parse image name"), "ImagePull"),
        (_waiting("CreateContainerConfigError", 'secret "hub-token" not found'), "MissingSecret"),
        (
            _waiting(
                "CreateContainerConfigError", "couldn't find key token in Secret default/hub-token"
            ),
            "MissingSecret",
        ),
        (
            _waiting("CreateContainerConfigError", 'configmap "tuning" not found'),
            "MissingConfigMap",
        ),
        (
            _waiting(
                "CreateContainerConfigError", "couldn't find key mode in ConfigMap default/tuning"
            ),
            "MissingConfigMap",
        ),
        (
            _waiting(
                "CreateContainerConfigError",
                'container has runAsNonRoot and image will run as root (pod: "qwen_default(1)", '
                "container: engine)",
            ),
            "ContainerConfig",
        ),
        (_waiting("RunContainerError", "failed to start containerd task"), "ContainerConfig"),
        (_exited("Traceback\nValueError: bad flag"), "CrashLoop"),
        (_exited(code=137, reason="OOMKilled"), "OOMKilled"),
        (_exited("ModelLoadFailed: no folder /models/a"), "ModelLoadFailed"),
        (_exited("loading\nModelLoadFailed: out of device memory\n"), "ModelLoadFailed"),
        (_exited("WorkerLost: worker 1 has gone"), "WorkerLost"),
        (replace(_exited("HTTP 401"), component="model-cache", pool=""), "ModelFetchFailed"),
        (
            replace(_exited("ModelLoadFailed: no such model"), component="model-cache", pool=""),
            "ModelFetchFailed",
        ),
        (
            replace(
                POD,
                phase="Failed",
                reason="Evicted",
                message="The node was low on resource: memory. Threshold quantity: 100Mi, "
                "available: 4Ki. ",
            ),
            "Evicted",
        ),
        (
            replace(
                POD,
                phase="Failed",
                reason="UnexpectedAdmissionError",
                message="Pod was rejected: Allocate failed due to requested number of devices "
                "unavailable for nvidia.com/gpu. Requested: 1, Available: 0, which is unexpected",
            ),
            "GPUInsufficient",
        ),
        (
            replace(
                POD,
                phase="Running",
                is_terminating=True,
                reason="NodeLost",
                message="Node n1 which was running pod qwen-s-bcdfgh-7d4f8-abcde is unresponsive",
            ),
            "NodeLost",
        ),
    ],
)
def test_a_pod_says_why_it_does_not_serve(pod: PodView, reason: str) -> None:
    failure = pod_failure(pod)

    assert failure is not None
    assert failure.reason == reason
    assert pod.name in failure.message


def test_the_message_repeats_the_pods_own_and_says_what_to_do() -> None:
    failure = pod_failure(_waiting("CreateContainerConfigError", 'secret "hub-token" not found'))

    assert failure is not None
    assert failure.message == (
        'pod qwen-s-bcdfgh-7d4f8-abcde: secret "hub-token" not found. Create the Secret with that '
        "key in the service's namespace, or correct its name."
    )


def test_a_long_message_is_cut() -> None:
    failure = pod_failure(_exited("x" * 4000))

    assert failure is not None
    assert len(failure.message) < 1024


@pytest.mark.parametrize(
    "pod",
    [
        replace(POD, is_ready=True, phase="Running"),
        POD,
        replace(_exited(), is_terminating=True),
        _waiting("ContainerCreating"),
        replace(POD, phase="Succeeded"),
        replace(POD, phase="Running", containers=(replace(ENGINE, exit_code=0),)),
        replace(POD, phase="Running", containers=(replace(ENGINE, exit_code=1, is_started=True),)),
    ],
)
def test_a_pod_that_serves_or_is_on_its_way_is_no_failure(pod: PodView) -> None:
    assert pod_failure(pod) is None


def test_a_failing_init_container_is_seen() -> None:
    init = ContainerView("init", False, 2, waiting_reason="ErrImagePull", waiting_message="no")
    pod = replace(_waiting("PodInitializing"), containers=(init, ENGINE))

    failure = pod_failure(pod)

    assert failure is not None
    assert failure.reason is FailureReason.IMAGE_PULL


def _refused(message: str) -> WorkloadView:
    return WorkloadView(
        kind="Deployment",
        name="qwen-s-bcdfgh",
        uid="u",
        pool="serving",
        revision="bcdfgh",
        created_s=1.0,
        generation=1,
        observed_generation=1,
        replicas=2,
        current_replicas=1,
        ready_replicas=1,
        failure_reason="FailedCreate",
        failure_message=message,
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            'pods "qwen-s-bcdfgh-7d4f8-abcde" is forbidden: exceeded quota: gpus, requested: '
            "requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=4, limited: "
            "requests.nvidia.com/gpu=4",
            "QuotaExceeded",
        ),
        (
            'pods "qwen-s-bcdfgh-7d4f8-abcde" is forbidden: failed quota: memory: must specify '
            "limits.memory for: engine",
            "QuotaExceeded",
        ),
        (
            'pods "qwen-s-bcdfgh-7d4f8-abcde" is forbidden: violates PodSecurity '
            '"restricted:latest": restricted volume types (volume "models" uses restricted volume '
            'type "hostPath")',
            "PodSecurityForbidden",
        ),
        (
            'pods "qwen-s-bcdfgh-7d4f8-abcde" is forbidden: no PriorityClass with name high was '
            "found",
            "PodsRefused",
        ),
    ],
)
def test_pods_that_cannot_be_made_come_first(message: str, reason: str) -> None:
    failure = first_failure([_exited()], [_refused(message)])

    assert failure is not None
    assert failure.reason == reason
    assert "Deployment qwen-s-bcdfgh" in failure.message


def test_a_refusal_of_the_past_is_none() -> None:
    full = replace(_refused("exceeded quota: q"), current_replicas=2)

    assert first_failure([], [full]) is None


def test_the_oldest_failing_pod_is_reported_and_pods_that_ended_come_last() -> None:
    ended = replace(POD, name="ended", phase="Failed", reason="Evicted", created_s=1.0)
    older = replace(_exited(), name="older", created_s=5.0)
    newer = replace(_exited(), name="newer", created_s=9.0)

    found = first_failure([newer, ended, older])
    alone = first_failure([ended])

    assert found is not None
    assert found.subject == "older"
    assert alone is not None
    assert alone.subject == "ended"


def test_a_leader_without_its_worker_says_so() -> None:
    leader = replace(POD, name="g-0", phase="Running", group_index=0, worker_index=0)
    worker = replace(leader, name="g-0-1", worker_index=1, is_terminating=True)
    other_groups = replace(worker, name="g-1-1", group_index=1)

    failure = first_failure([leader, worker])

    assert failure is not None
    assert failure.reason is FailureReason.WORKER_LOST
    assert "g-0-1" in failure.message
    assert first_failure([leader, other_groups]) is None


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (_exited(), True),
        (replace(POD, containers=(replace(ENGINE, restart_count=1, exit_code=1),)), False),
        (_waiting("ImagePullBackOff"), True),
        (_waiting("CreateContainerConfigError", 'secret "a" not found'), True),
        (_unplaced("0/1 nodes are available: 1 Insufficient cpu."), False),
        (replace(POD, is_ready=True), False),
    ],
)
def test_only_what_hardly_heals_by_itself_is_hopeless(pod: PodView, expected: bool) -> None:
    assert is_hopeless(pod) is expected
