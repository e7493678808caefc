"""What a router adds to a client's request on its way to a native engine.

The HTTP body is `u32 length ‖ MessagePack envelope ‖ the client's own JSON body`, with the content
type `names.ENVELOPE_CONTENT_TYPE` and the per-service secret in `names.SECRET_HEADER`. A client
cannot forge it: an engine that has no secret, or is shown another one, refuses the content type
with 403.
"""

from __future__ import annotations

import hmac

import msgspec

from kvoy_contract.errors import BadRequest


class ResumeState(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a request has come on another engine, as its client was told."""

    output_ids: list[list[int]]
    """One list per choice."""
    begun: list[int] = []
    """Choices that have said something, with ids or without: their role, their echo."""
    ended: list[int] = []
    """Choices whose finish reason has been told: nothing more is said of them."""
    cached_tokens: int | None = None
    """Prompt tokens that the first engine found in its cache, for the usage; None: not told."""


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields are only ever added, with defaults: neighbouring versions work together."""

    router_id: str
    """Random, new at each start of a router."""
    number: int
    """This router's running count of requests to this engine, from 1; load reports settle it."""
    settled_through: int = 0
    """All numbers up to here are answered, failed or abandoned: nothing waits for them."""
    request_id: str = ""
    token_ids: bytes = b""
    """`blocks.pack_tokens` of the prompt (empty: the engine tokenises the body itself)."""
    tokenizer_digest: str = ""
    """Of the tokenizer that made `token_ids`; the engine tokenises itself when its own differs."""
    seed: int | None = None
    """For a request without a seed of its own, so that another engine can continue it."""
    want_token_ids: bool = False
    """Close each write with the token ids that it says, as `sse.token_ids_event`."""
    resume: ResumeState | None = None
    transfer_id: str = ""
    answer_id: str = ""
    """What the answer's `id` is made of, so that another engine goes on under the same one; empty:
    the request's id."""
    created: int = 0
    """The answer's `created`, seconds since 1970; 0: the engine's own time."""
    priority: int | None = None
    """Within the engine, lower first; None: what the body says."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope, body: bytes) -> bytes:
    return encode_head(envelope) + body


def encode_head(envelope: Envelope) -> bytes:
    """What stands before the client's body, which may be large."""
    head = _encoder.encode(envelope)
    return len(head).to_bytes(4, "little") + head


def decode(data: bytes) -> tuple[Envelope, bytes]:
    """Raises BadRequest when the framing or the envelope is malformed."""
    end = 4 + int.from_bytes(data[:4], "little")
    if len(data) < end or end == 4:
        raise BadRequest("The internal envelope is cut short.")
    try:
        envelope = _decoder.decode(data[4:end])
    except msgspec.ValidationError as error:
        raise BadRequest(f"The internal envelope is malformed: {error}") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The internal envelope is not MessagePack: {error}") from None
    if len(envelope.token_ids) % 4:
        raise BadRequest("The internal envelope is malformed: its token ids are cut short.")
    return envelope, data[end:]


def check_secret(secret: str | None) -> None:
    """Raises ValueError for a secret that no header can carry, as one with a line end."""
    if secret and not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise ValueError(
            "the secret travels in headers: it must be ASCII, without spaces and line ends"
        )


def secret_matches(expected: str | None, shown: str | None) -> bool:
    """Whether `shown` is the per-service secret; never true where none is configured."""
    if not expected or shown is None:
        return False
    return hmac.compare_digest(expected.encode(), shown.encode())
