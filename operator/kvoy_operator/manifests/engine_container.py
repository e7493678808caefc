"""The engine's container: image, command, environment, devices, probes. Pure."""

from __future__ import annotations

import math
from typing import Final

from kvoy_contract.names import (
    DEFAULT_ENGINE_PORT,
    GROUP_PORT,
    PREFILL_POOL,
    TELEMETRY_PORT_OFFSET,
)
from kvoy_operator.identity import Manifest, internal_secret_name
from kvoy_operator.manifests.access import SECRET_KEY
from kvoy_operator.manifests.model_source import HOME_FOLDER, ModelSource, is_simulated
from kvoy_operator.manifests.parts import (
    http_probe,
    restricted_container,
    sleep_before_stop,
    tmp_mount,
)
from kvoy_operator.options import RenderOptions
from kvoy_operator.resources import LLMService
from kvoy_operator.spec_engine import EnvVar
from kvoy_operator.spec_pool import PoolSpec

CONTAINER: Final = "engine"
SHM_VOLUME: Final = "shm"
PRE_STOP_S: Final = 5
"""Within it every router has seen that the pod goes, by its own watch."""
_HTTP_PORT: Final = "http"
_TELEMETRY_PORT: Final = DEFAULT_ENGINE_PORT + TELEMETRY_PORT_OFFSET
_STARTUP_PERIOD_S: Final = 2


def engine_image(service: LLMService, pool: PoolSpec, options: RenderOptions) -> str:
    if service.spec.engine.image is not None:
        return service.spec.engine.image
    if is_simulated(service):
        return options.sim_image
    return options.engine_cuda_image if pool.gpus > 0 else options.engine_image


def pull_policy(service: LLMService, options: RenderOptions) -> str:
    return service.spec.engine.image_pull_policy or options.image_pull_policy


def engine_container(
    service: LLMService,
    pool_name: str,
    source: ModelSource,
    options: RenderOptions,
    *,
    is_worker: bool,
) -> Manifest:
    """The container of a pod that serves, or of a group's other pods, the workers.

    A worker has no readiness of its own: it is ready once it has joined its leader, and what can
    be served is the leader's to say.
    """
    pool = service.spec.pools[pool_name]
    container: Manifest = {
        "name": CONTAINER,
        "image": engine_image(service, pool, options),
        "imagePullPolicy": pull_policy(service, options),
        "command": ["kvoy", "serve"],
        "args": _arguments(service, pool_name, source.arguments),
        "env": _environment(service, source),
        "ports": _ports(pool),
        "resources": _resources(pool),
        "securityContext": restricted_container(),
        "startupProbe": http_probe(
            "/started",
            _HTTP_PORT,
            period_s=_STARTUP_PERIOD_S,
            failures=math.ceil(service.spec.engine.load_timeout.seconds / _STARTUP_PERIOD_S),
            timeout_s=5,
        ),
        "livenessProbe": http_probe("/health", _HTTP_PORT, period_s=10, failures=3, timeout_s=10),
        "lifecycle": sleep_before_stop(PRE_STOP_S),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *source.mounts,
            {"name": SHM_VOLUME, "mountPath": "/dev/shm"},
            tmp_mount(),
        ],
    }
    if not is_worker:
        container["readinessProbe"] = http_probe(
            "/ready", _HTTP_PORT, period_s=2, failures=2, timeout_s=5
        )
    return container


def environment_of(variables: tuple[EnvVar, ...]) -> list[Manifest]:
    """The user's variables as a pod has them; of a name that is given twice, the last."""
    by_name = {
        variable.name: variable.model_dump(by_alias=True, exclude_none=True)
        for variable in variables
    }
    return list(by_name.values())


def _arguments(service: LLMService, pool_name: str, model: tuple[str, ...]) -> list[str]:
    spec = service.spec
    parallelism = spec.pools[pool_name].effective_parallelism
    arguments = [
        *model,
        "--host=0.0.0.0",
        f"--port={DEFAULT_ENGINE_PORT}",
        f"--telemetry-port={_TELEMETRY_PORT}",
        f"--served-model-name={service.model_name}",
        "--expect-router",
        f"--role={_role(service, pool_name)}",
        f"--drain-timeout-s={spec.rollout.drain_timeout.whole_seconds}",
        "--log-format=json",
    ]
    if is_simulated(service):
        arguments.append("--runner=sim")
    if parallelism.tensor > 1:
        arguments.append(f"--tensor-parallel-size={parallelism.tensor}")
    if parallelism.pipeline > 1:
        arguments.append(f"--pipeline-parallel-size={parallelism.pipeline}")
    if spec.engine.max_model_len is not None:
        arguments.append(f"--max-model-len={spec.engine.max_model_len}")
    if spec.engine.kv_cache_fraction is not None:
        arguments.append(f"--gpu-memory-utilization={spec.engine.kv_cache_fraction}")
    return [*arguments, *spec.engine.args]


def _role(service: LLMService, pool_name: str) -> str:
    if service.spec.prefill is None:
        return "both"
    return "prefill" if pool_name == PREFILL_POOL else "decode"


def _environment(service: LLMService, source: ModelSource) -> list[Manifest]:
    """Ours first, so that a user's variables may refer to them, or replace all but the secret."""
    key = {"name": internal_secret_name(service.name), "key": SECRET_KEY}
    users = environment_of(service.spec.engine.env)
    replaced = {variable["name"] for variable in users}
    ours: list[Manifest] = [
        {"name": "KVOY_SECRET", "valueFrom": {"secretKeyRef": key}},
        # Caches of libraries go where the container may write.
        {"name": "HOME", "value": HOME_FOLDER},
        *source.environment,
    ]
    return [variable for variable in ours if variable["name"] not in replaced] + users


def _ports(pool: PoolSpec) -> list[Manifest]:
    named = [(_HTTP_PORT, DEFAULT_ENGINE_PORT), ("telemetry", _TELEMETRY_PORT)]
    if pool.nodes > 1:
        named.append(("group", GROUP_PORT))
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in named]


def _resources(pool: PoolSpec) -> Manifest:
    """GPUs of a device plugin are both requested and limited: Kubernetes wants them equal."""
    has_plugin_gpus = pool.gpus > 0 and not pool.resource_claims
    gpus = {pool.gpu_resource: str(pool.gpus)} if has_plugin_gpus else {}
    claims = [
        {"name": claim.name} | ({"request": claim.request} if claim.request else {})
        for claim in pool.resource_claims
    ]
    resources: Manifest = {
        "requests": {**pool.resources.requests, **gpus},
        "limits": {**pool.resources.limits, **gpus},
        "claims": claims,
    }
    return {name: value for name, value in resources.items() if value}
