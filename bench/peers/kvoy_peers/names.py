"""The routes that others than the catalogue speak of by name."""

from __future__ import annotations

DIRECT = "direct"
RELAY = "relay"
KVOY = "kvoy"
ENVOY = "envoy"
VLLM_ROUTER = "vllm-router"
