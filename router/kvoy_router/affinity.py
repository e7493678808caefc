"""What a conversation keeps from its first turn to its last: the beginning of its prompt.

A chat's beginning reaches to the end of the first message of a user. What stands before it is often
the same for a whole application, and the rest grows with each turn."""

from __future__ import annotations

import hashlib

import msgspec

from kvoy_contract.openai import ChatCompletionRequest, CompletionRequest

_MAX_CHARS = 4096
"""Of one message, or of a plain prompt; as many token ids of one that comes as ids."""

_encoder = msgspec.msgpack.Encoder()


def affinity_of(request: ChatCompletionRequest | CompletionRequest) -> bytes:
    """Equal for all turns of a conversation, and different for most conversations."""
    digest = hashlib.blake2b((request.cache_salt or "").encode(), digest_size=16)
    if isinstance(request, CompletionRequest):
        digest.update(_encoder.encode(request.prompts[0][:_MAX_CHARS]))
        return digest.digest()
    for message in request.messages:
        content = message.content or ""
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        # The length tells apart what differs only after the part that is looked at.
        pieces = [(len(text), text[:_MAX_CHARS]) for text in texts]
        digest.update(_encoder.encode((message.role, pieces)))
        if message.role == "user":
            break
    return digest.digest()
