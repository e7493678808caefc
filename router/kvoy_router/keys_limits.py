"""How much each API key has used of its limits per minute. Pure: time comes as an argument."""

from __future__ import annotations

from collections.abc import Collection

from kvoy_contract.errors import Saturated
from kvoy_router.keys import Key
from kvoy_router.token_bucket import TokenBucket


class KeyLimits:
    """Keeps a bucket for each limit in use; a changed limit keeps what is used up of it."""

    def __init__(self) -> None:
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._requests) + len(self._tokens)

    def take_request(self, key: Key, now_s: float) -> None:
        """Raises Saturated where one of the key's limits is used up: then nothing is taken."""
        requests = self._bucket(self._requests, key, key.requests_per_minute, now_s)
        tokens = self._bucket(self._tokens, key, key.tokens_per_minute, now_s)
        if requests is not None and (wait_s := requests.wait_s(now_s)) > 0.0:
            raise _exceeded(f"{key.requests_per_minute} requests", wait_s)
        # Whatever is left is enough to begin: nobody knows how long the answer will be.
        if tokens is not None and (wait_s := tokens.wait_s(now_s)) > 0.0:
            raise _exceeded(f"{key.tokens_per_minute} tokens", wait_s)
        if requests is not None:
            requests.take(1.0, now_s)

    def give_back_request(self, key: Key, now_s: float) -> None:
        """What `take_request` took: the request has not been served, for no fault of its own."""
        bucket = self._bucket(self._requests, key, key.requests_per_minute, now_s)
        if bucket is not None:
            bucket.take(-1.0, now_s)

    def take_tokens(self, key: Key, tokens: float, now_s: float) -> None:
        """Count what a request has used; later ones wait for it where it was more than is left."""
        bucket = self._bucket(self._tokens, key, key.tokens_per_minute, now_s)
        if bucket is not None:
            bucket.take(tokens, now_s)

    def keep_only(self, key_ids: Collection[str]) -> None:
        """Forget keys that there are no more."""
        for buckets in (self._requests, self._tokens):
            for key_id in buckets.keys() - set(key_ids):
                del buckets[key_id]

    def _bucket(
        self, buckets: dict[str, TokenBucket], key: Key, per_minute: int | None, now_s: float
    ) -> TokenBucket | None:
        if per_minute is None:
            buckets.pop(key.id, None)
            return None
        bucket = buckets.get(key.id)
        if bucket is None:
            bucket = buckets[key.id] = TokenBucket(per_minute, now_s)
        elif bucket.per_minute != per_minute:
            bucket.resize(per_minute, now_s)
        return bucket


def _exceeded(limit: str, wait_s: float) -> Saturated:
    return Saturated(
        f"This API key may use {limit} per minute, and has.",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )
