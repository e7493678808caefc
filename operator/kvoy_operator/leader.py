"""Leader election by a Lease: of several operators one acts, and another one takes over in time.

The holder renews the Lease; the others watch it by their own clocks, so that clocks need not agree.
A holder that cannot renew in time raises, and its process ends before another one may begin. One
that was stopped for a while, and does not know yet, `may_act` no more.

When the holder is killed, the Lease is taken within `retry_s + lease_s` and the time of two calls:
it may have been renewed just after the others looked, and they wait it out from their next look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvoy_operator.api import Api
from kvoy_operator.api_errors import ApiFailure, ApiRefusal
from kvoy_operator.kinds import LEASE

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    lease_s: float = 11.0
    """After so long without a renewal others may take the Lease. Whole seconds."""
    renew_deadline_s: float = 8.0
    """After so long without a successful renewal the holder gives up; less than `lease_s` by what
    its last call may take to be carried out."""
    retry_s: float = 1.5
    """Between two renewals, or two looks at the Lease."""
    again_s: float = 0.5
    """After a renewal that failed."""

    call_s: float = 2.5
    """Limit of one call: three fit into the deadline."""


class LeadershipLost(Exception):
    """The Lease belongs to somebody else, or could not be renewed in time."""


class LeaderElection:
    """`acquire`, then `hold` until it raises or is cancelled, then `release`."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes | None = None,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._times = times or LeaseTimes()
        self._lease: dict[str, Any] = {}
        self._seen_version = ""
        self._seen_s = 0.0
        self._reported = ""
        self._is_holder = False
        self._written_s = 0.0

    @property
    def may_act(self) -> bool:
        """Whether the Lease is ours and nobody else can have it yet, by this moment's clock."""
        return self._is_holder and self._now() < self._deadline_s

    @property
    def _deadline_s(self) -> float:
        return self._written_s + self._times.renew_deadline_s

    async def acquire(self) -> None:
        """Return once the Lease is ours. A server that cannot be reached is waited for."""
        while True:
            try:
                if await self._try_to_acquire():
                    self._is_holder = True
                    return
            except ApiFailure as error:
                self._report(f"cannot reach the lease: {error}")
            await asyncio.sleep(self._until_next_look_s())

    async def hold(self) -> None:
        """Renew until cancelled. Raises LeadershipLost."""
        wait_s = self._times.retry_s
        try:
            while True:
                await asyncio.sleep(wait_s)
                if not self.may_act:
                    raise LeadershipLost("the lease could not be renewed in time")
                is_renewed = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._deadline_s):
                        is_renewed = await self._renew()
                wait_s = self._times.retry_s if is_renewed else self._times.again_s
        finally:
            self._is_holder = False

    async def release(self) -> None:
        """Give the Lease up, so that another one need not wait for its end."""
        try:
            try:
                await self._free()
            except ApiRefusal as error:
                if not error.is_conflict:
                    raise
                # Likely by a renewal of ours whose answer nobody awaited any more.
                await self._read()
                await self._free()
        except ApiFailure as error:
            log.warning("the lease was not released", extra={"error": str(error)})

    async def _free(self) -> None:
        if self._holder() != self._identity:
            return
        self._fill(holder="", lease_s=1)
        await self._write("PUT")

    async def _renew(self) -> bool:
        """Whether the Lease was renewed. Raises LeadershipLost when somebody else has it."""
        try:
            self._fill(holder=self._identity, lease_s=self._times.lease_s)
            await self._write("PUT")
            return True
        except ApiRefusal as error:
            if not (error.is_conflict or error.is_not_found):
                return False
        except ApiFailure:
            return False
        # Somebody wrote the Lease, which may have been ourselves in a request without an answer.
        try:
            await self._read()
        except ApiFailure:
            return False
        if self._holder() not in ("", self._identity):
            raise LeadershipLost(f"the lease belongs to {self._holder()}")
        return False

    async def _try_to_acquire(self) -> bool:
        try:
            await self._read()
        except ApiRefusal as error:
            if not error.is_not_found:
                raise
            return await self._take("POST")
        if self._holder() == self._identity or not self._holder() or self._left_s() <= 0:
            return await self._take("PUT")
        self._report(f"the lease belongs to {self._holder()}")
        return False

    async def _take(self, method: str) -> bool:
        if method == "POST":
            self._lease = {"metadata": {"name": self._name}, "spec": {"leaseTransitions": -1}}
        self._fill(holder=self._identity, lease_s=self._times.lease_s)
        try:
            await self._write(method)
        except ApiRefusal as error:
            if error.is_conflict:
                return False
            raise
        log.info("leads", extra={"identity": self._identity})
        return True

    def _left_s(self) -> float:
        """How long the Lease lasts from now on if it stays as it is, by our own clock."""
        spec = self._lease.get("spec") or {}
        duration_s = float(spec.get("leaseDurationSeconds") or self._times.lease_s)
        return self._seen_s + duration_s - self._now()

    def _until_next_look_s(self) -> float:
        """The end of the Lease is not slept through."""
        left_s = self._left_s()
        return min(self._times.retry_s, left_s) if left_s > 0 else self._times.retry_s

    def _holder(self) -> str:
        return str((self._lease.get("spec") or {}).get("holderIdentity") or "")

    def _fill(self, *, holder: str, lease_s: float) -> None:
        spec = self._lease.setdefault("spec", {})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if spec.get("holderIdentity") != holder:
            spec["acquireTime"] = now
            if holder:
                spec["leaseTransitions"] = spec.get("leaseTransitions", 0) + 1
        spec |= {"holderIdentity": holder, "leaseDurationSeconds": int(lease_s), "renewTime": now}

    async def _read(self) -> None:
        path = LEASE.path(self._namespace, self._name)
        self._see(await self._api.request("GET", path, timeout_s=self._times.call_s))

    async def _write(self, method: str) -> None:
        path = LEASE.path(self._namespace, "" if method == "POST" else self._name)
        started_s = self._now()
        self._see(
            await self._api.request(method, path, body=self._lease, timeout_s=self._times.call_s)
        )
        # Counted from before the request: the server wrote it at some time since.
        self._written_s = started_s

    def _see(self, lease: dict[str, Any]) -> None:
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen_version:
            self._seen_version, self._seen_s = version, self._now()
        self._lease = lease

    def _report(self, state: str) -> None:
        if state != self._reported:
            self._reported = state
            log.info("follows", extra={"identity": self._identity, "why": state})

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
