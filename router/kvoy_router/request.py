"""What the decision core knows about one request: sizes and hashes, no text and no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvoy_contract.blocks import BlockHash


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """One prompt on its way to one engine. A request with several prompts is several of these."""

    request_id: str
    model: str
    num_prompt_tokens: int
    hashes: Sequence[BlockHash] = ()
    """Of the end of each full stride of the prompt, in order; made with the engines' identity and
    salt."""
    stride: int = 64
    """Tokens that each further hash stands for."""
    max_tokens: int | None = None
    """The client's limit on output tokens; None: up to the model's limit."""
    num_choices: int = 1
    priority: int = 0
    """Lower runs first."""
    salt: str = ""
    """Already part of `hashes`; here for logs alone."""
    prompt_field: str = "messages"
    """Where the client wrote the prompt, for errors about it."""
    affinity: bytes = b""
    """Of the prompt's beginning; chooses among services that share the model."""
