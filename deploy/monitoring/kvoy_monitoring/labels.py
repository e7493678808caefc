"""The labels that scraping gives to a pod's series, beside its own.

The chart's monitors set them from the pods' labels; whoever scrapes in another way does the same.
"""

from __future__ import annotations

from typing import Final

NAMESPACE: Final = "namespace"
POD: Final = "pod"
SERVICE: Final = "llmservice"
"""From `kvoy.dev/service`."""
ROUTER: Final = "llmrouter"
"""From `kvoy.dev/router`: a router that several services share."""
POOL: Final = "pool"
"""From `kvoy.dev/pool`."""
