"""From a parsed resource to its children as plain dictionaries. Pure: no cluster, no clock.

    render_support         what stands around a service's engines
    render_workload        one pool of a service in one revision
    render_shared_router   the children of an LLMRouter

Every object names its owner as controller, so that garbage collection takes it down with the owner.
"""

from kvoy_operator.manifests.model_cache import is_model_cached
from kvoy_operator.manifests.service import render_support
from kvoy_operator.manifests.shared_router import is_behind, render_shared_router
from kvoy_operator.manifests.workload import render_workload

__all__ = [
    "is_behind",
    "is_model_cached",
    "render_shared_router",
    "render_support",
    "render_workload",
]
