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
