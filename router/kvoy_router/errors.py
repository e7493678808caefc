"""What goes wrong between the router and what it talks to, and what each means for the client.

UpstreamError                      an attempt at one engine failed
  ConnectFailed          503       nothing was sent: the engine is not there now
  ConnectionBroken       502       the engine closed or reset before its answer was complete
  BadResponse            502       the answer is not HTTP, or not what the path promises
  FirstByteTimeout       504       no answer within the limit
  IdleTimeout            504       an answer began and then stopped
  EngineHung             504       the engine shows no sign of life, see `hang_watch`
  EngineErrored          502       it said an error of its own within a stream
  ResumeRefused          502       it does not go on with another engine's stream

BadFile                            a file of keys or certificates cannot be used at the start

KubeError                          a call to the Kubernetes API failed; changes no engine
  NoClusterError                   there is no usable configuration of a cluster

No UpstreamError reaches a client as such: `to_api_error` makes the OpenAI error object. Whether
another engine may be tried depends on what the client has seen, which the proxy knows."""

from __future__ import annotations

from kvoy_contract.errors import ApiError, DeadlineExceeded, Unavailable, UpstreamFailed

RETRY_AFTER_S = 2.0
"""About how soon another engine, or the same one again, may be there."""


class UpstreamError(Exception):
    """`outcome` is the word for metrics and logs."""

    outcome = "upstream_error"

    def to_api_error(self) -> ApiError:
        return UpstreamFailed(f"The engine failed: {self}")


class ConnectFailed(UpstreamError):
    outcome = "connect_failed"

    def to_api_error(self) -> ApiError:
        return Unavailable(f"No engine can be reached: {self}", retry_after_s=RETRY_AFTER_S)


class ConnectionBroken(UpstreamError):
    outcome = "connection_broken"


class BadResponse(UpstreamError):
    outcome = "bad_response"


class FirstByteTimeout(UpstreamError):
    outcome = "first_byte_timeout"

    def to_api_error(self) -> ApiError:
        return DeadlineExceeded(
            "The engine did not begin to answer in time.", code="engine_timeout"
        )


class IdleTimeout(UpstreamError):
    outcome = "idle_timeout"

    def to_api_error(self) -> ApiError:
        return DeadlineExceeded("The engine stopped answering.", code="engine_timeout")


class EngineHung(UpstreamError):
    outcome = "hung"

    def to_api_error(self) -> ApiError:
        return DeadlineExceeded(f"The engine hangs: {self}", code="engine_timeout")


class EngineErrored(UpstreamError):
    outcome = "error_event"


class ResumeRefused(UpstreamError):
    outcome = "resume_refused"


class BadFile(Exception):
    """A file that has to be good at the start: of keys, of certificates."""


class KubeError(Exception):
    """`status` is the API's own answer; 0: there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoClusterError(KubeError):
    pass
