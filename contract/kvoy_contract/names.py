"""Header, label, port and path names that two components share.

Headers that begin with `x-kvoy-` belong to Kvoy: a router answers with some and refuses them all in
a client's request, so that only a holder of the per-service secret can speak them to an engine.
"""

KVOY_HEADER_PREFIX = "x-kvoy-"

# Response headers of a router (a switch turns them off).
ENGINE_HEADER = "x-kvoy-engine"
CACHED_TOKENS_HEADER = "x-kvoy-cached-tokens"

# Request header from a router to an engine: the per-service secret.
SECRET_HEADER = "x-kvoy-secret"
# The same secret in gRPC metadata.
SECRET_METADATA_KEY = "x-kvoy-secret"

REQUEST_ID_HEADER = "x-request-id"

# Content type of a request that carries an `envelope.Envelope` before the client's own body.
ENVELOPE_CONTENT_TYPE = "application/vnd.kvoy.request"

CHAT_COMPLETIONS_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
MODELS_PATH = "/v1/models"
TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"

DEFAULT_ROUTER_PORT = 8000
DEFAULT_ENGINE_PORT = 8100
"""HTTP; the engine's gRPC telemetry listens on the HTTP port + 1000 unless told otherwise."""
TELEMETRY_PORT_OFFSET = 1000
ROUTER_ADMIN_PORT = 8001
GROUP_PORT = 9200
"""Where the leader of a group of engine processes waits for the others."""

# Labels and annotations in a cluster.
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "kvoy-operator"
SERVICE_LABEL = "kvoy.dev/service"
ROUTER_LABEL = "kvoy.dev/router"
COMPONENT_LABEL = "kvoy.dev/component"
POOL_LABEL = "kvoy.dev/pool"
REVISION_LABEL = "kvoy.dev/revision"
ENGINE_COMPONENT = "engine"
ROUTER_COMPONENT = "router"
MODEL_CACHE_COMPONENT = "model-cache"
SERVING_POOL = "serving"
PREFILL_POOL = "prefill"
RESTARTED_AT_ANNOTATION = "kvoy.dev/restartedAt"

API_GROUP = "kvoy.dev"
API_VERSION = "v1alpha1"
