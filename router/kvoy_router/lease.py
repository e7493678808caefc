"""Leases: one request's claim on one engine, and the ledger that counts each claim exactly once.

A claim is either in the engine's own numbers (its last load report says that it has admitted the
request) or in this router's reservation, never in both and never in neither. The ledger keeps the
reservation's sums up to date at every event, so that reading them costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoy_router.endpoint import Endpoint, LoadView

REPORT_LAG_S = 0.5
"""For engines that do not settle by number: a report includes what was sent so long before it
came."""


class Lease:
    """Reserved inside the pick, given back by `release`, which may be called any number of
    times."""

    __slots__ = (
        "_on_release",
        "assumed_keys",
        "cached_tokens",
        "context_tokens",
        "endpoint",
        "first_token_s",
        "is_home",
        "is_open",
        "is_settled",
        "ledger",
        "model",
        "number",
        "prefill_tokens",
        "settled_through",
        "slot",
        "started_s",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        *,
        cached_tokens: int,
        prefill_tokens: int,
        context_tokens: int,
        assumed_keys: Sequence[int],
        now_s: float,
        on_release: Callable[[Lease, float, int | None], None],
    ) -> None:
        self.endpoint = endpoint
        self.model = model
        self.cached_tokens = cached_tokens
        """Predicted at the pick."""
        self.prefill_tokens = prefill_tokens
        """Still to compute, as predicted; 0 from the first token on."""
        self.context_tokens = context_tokens
        """Prompt tokens that its decodes will read."""
        self.started_s = now_s
        self.first_token_s: float | None = None
        self.is_home = False
        """Whether the prompt was new to the whole fleet: see `homes`."""
        self.assumed_keys = assumed_keys
        """Index keys that this lease alone claims for its endpoint."""
        self.slot = endpoint.slot
        self.is_open = True
        self.is_settled = False
        """Whether the engine's own numbers include it."""
        self.ledger = endpoint.ledger
        self._on_release = on_release
        self.number, self.settled_through = self.ledger.open(self)

    def on_first_token(self, now_s: float) -> None:
        """The prompt is computed: only decoding is left."""
        if self.first_token_s is None and self.is_open:
            self.first_token_s = now_s
            self.ledger.end_prefill(self)

    def release(self, now_s: float, output_tokens: int | None = None) -> None:
        """Give everything back; `output_tokens`, where known, teaches the pool how long answers
        are."""
        if self.is_open:
            self.is_open = False
            self.ledger.close(self)
            self._on_release(self, now_s, output_tokens)


class Ledger:
    """All leases on one engine. `unsettled_*` are the sums that its reports do not include yet."""

    __slots__ = (
        "_open",
        "_orphans",
        "_unsettled",
        "ended",
        "ended_context_tokens",
        "ended_prefill_tokens",
        "last_number",
        "unsettled_context_tokens",
        "unsettled_prefill_tokens",
        "version",
        "watch",
    )

    def __init__(self, last_number: int = 0) -> None:
        self.last_number = last_number
        """Numbers go on after it, so that a re-added engine never sees one twice."""
        self._open: dict[int, Lease] = {}
        self._orphans: dict[int, Lease] = {}
        """Open leases on an earlier epoch: in flight, but no load on the engine that is there
        now."""
        self._unsettled: dict[int, Lease] = {}
        self.unsettled_prefill_tokens = 0
        self.unsettled_context_tokens = 0
        self.ended = 0
        """Leases that the last report counts although they have ended since."""
        self.ended_prefill_tokens = 0
        """Of prompts that it has queued although they have been computed, or given up, since."""
        self.ended_context_tokens = 0
        self.version = 0
        """Counts changes, so that what was derived from the sums can be kept until the next one."""
        self.watch: Callable[[], object] | None = None
        """Told of each change."""

    @property
    def in_flight(self) -> int:
        return len(self._open) + len(self._orphans)

    @property
    def unsettled(self) -> int:
        return len(self._unsettled)

    @property
    def settled_through(self) -> int:
        """Every number up to here has ended."""
        first = next(iter(self._open), None)
        return self.last_number if first is None else first - 1

    def open(self, lease: Lease) -> tuple[int, int]:
        """Returns the lease's number and the number through which all others have ended."""
        settled_through = self.settled_through
        self._change()
        self.last_number += 1
        self._open[self.last_number] = lease
        self._unsettled[self.last_number] = lease
        self.unsettled_prefill_tokens += lease.prefill_tokens
        self.unsettled_context_tokens += lease.context_tokens
        return self.last_number, settled_through

    def end_prefill(self, lease: Lease) -> None:
        if lease.number in self._unsettled:
            self._change()
            self.unsettled_prefill_tokens -= lease.prefill_tokens
        elif lease.number in self._open:
            # The report still has its prompt queued, and may be as old as a large fleet makes it.
            self._change()
            self.ended_prefill_tokens += lease.prefill_tokens
        lease.prefill_tokens = 0

    def close(self, lease: Lease) -> None:
        self._change()
        if self._orphans.pop(lease.number, None) is not None:
            return
        del self._open[lease.number]
        if lease.number in self._unsettled:
            self._drop_unsettled(lease)
        else:
            self.ended += 1
            self.ended_prefill_tokens += lease.prefill_tokens
            self.ended_context_tokens += lease.context_tokens

    def settle(self, report: LoadView, now_s: float, *, by_number: bool) -> None:
        """A new report has come: what it includes leaves the reservation."""
        self._change()
        self.ended = self.ended_prefill_tokens = self.ended_context_tokens = 0
        if not self._unsettled:
            return
        for lease in list(self._unsettled.values()):
            if by_number:
                is_included = (
                    lease.number <= report.admitted_through
                    or lease.number in report.admitted_beyond
                )
            else:
                is_included = lease.started_s <= now_s - REPORT_LAG_S
            if is_included:
                self._drop_unsettled(lease)
                lease.is_settled = True

    def forget_report(self) -> None:
        """No report is trusted any more: every open lease is this router's own estimate again."""
        self._change()
        self.ended = self.ended_prefill_tokens = self.ended_context_tokens = 0
        self.unsettled_prefill_tokens = self.unsettled_context_tokens = 0
        self._unsettled = dict(self._open)
        for lease in self._open.values():
            lease.is_settled = False
            self.unsettled_prefill_tokens += lease.prefill_tokens
            self.unsettled_context_tokens += lease.context_tokens

    def orphan_all(self) -> None:
        """The engine has restarted: what was sent to it before is lost."""
        self._orphans |= self._open
        self._open.clear()
        self.forget_report()

    def check_integrity(self) -> None:
        assert self._unsettled.keys() <= self._open.keys()
        assert not self._open.keys() & self._orphans.keys()
        leases = self._unsettled.values()
        assert self.unsettled_prefill_tokens == sum(lease.prefill_tokens for lease in leases)
        assert self.unsettled_context_tokens == sum(lease.context_tokens for lease in leases)
        assert min(self.ended, self.ended_prefill_tokens, self.ended_context_tokens) >= 0

    def _change(self) -> None:
        self.version += 1
        if self.watch is not None:
            self.watch()

    def _drop_unsettled(self, lease: Lease) -> None:
        del self._unsettled[lease.number]
        self.unsettled_prefill_tokens -= lease.prefill_tokens
        self.unsettled_context_tokens -= lease.context_tokens
