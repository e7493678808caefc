"""One engine as this router knows it: who it is, what it last said, how far that is to be trusted.

Owns no index and takes no decision. Telemetry fills it through the pool; filters and cost read it.
Times are seconds on the caller's clock. What is not known is None, never zero.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvoy_router.lease import Ledger
from kvoy_router.step_law import StepLaw

if TYPE_CHECKING:
    from kvoy_router.occupancy import Occupancy


class Role(enum.StrEnum):
    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Knowledge(enum.StrEnum):
    """How far the router's picture of an engine's cache and load can be trusted.

    NEW → SYNCING → EXACT, and from each of them → LOST → SYNCING; a new epoch leads back to NEW.
    """

    NEW = "new"
    """Nothing has been reported yet; judged like an average engine."""
    SYNCING = "syncing"
    """A snapshot is coming in; what is indexed so far is true but not complete."""
    EXACT = "exact"
    LOST = "lost"
    """The stream broke; forgotten, and avoided while others are known."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose engine it is and where discovery found it. Of engines from a list all but the secret
    is empty."""

    service: str = ""
    pod: str = ""
    pod_uid: str = ""
    pool: str = ""
    revision: str = ""
    secret: str = field(default="", repr=False)
    """What the engine asks of a router."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Mirrors `EngineDescription` of the telemetry contract: constant for the life of an epoch."""

    epoch: bytes
    served_model: str
    aliases: tuple[str, ...] = ()
    model_identity: str = ""
    adapters: tuple[str, ...] = ()
    role: Role = Role.BOTH
    block_size: int = 16
    hash_stride: int = 64
    num_blocks: int = 0
    block_bytes: int = 0
    max_model_len: int = 0
    """Tokens of prompt and output; 0: not told."""
    max_num_seqs: int = 0
    """0: not told."""
    max_num_batched_tokens: int = 0
    tokenizer_digest: str = ""
    numerics: str = ""
    engine_kind: str = ""
    engine_version: str = ""
    vocab_size: int = 0
    device_memory_bytes: int = 0
    takes_envelope: bool = False
    gives_token_ids: bool = False
    can_resume: bool = False
    takes_transfer_ids: bool = False
    takes_cache_salt: bool = False
    settles_by_number: bool = False
    """Load reports say which of this router's requests they include."""

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.served_model, *(name for name in self.aliases if name != self.served_model))


@dataclass(frozen=True, slots=True)
class LoadView:
    """Mirrors `LoadReport` of the telemetry contract."""

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    free_blocks: int = 0
    evictable_blocks: int = 0
    total_blocks: int = 0
    free_device_bytes: int = 0
    prefill_tokens_per_s: float = 0.0
    """0: not measured yet."""
    step_time_s: float = 0.0
    """0: not measured yet."""
    draining: bool = False
    ready: bool = True
    admitted_through: int = 0
    admitted_beyond: tuple[int, ...] = ()
    running_tokens: int = 0
    num_preemptions: int = 0
    uptime_s: float = 0.0
    generated_tokens: int = 0
    last_step_age_s: float = 0.0


class Endpoint:
    """An engine's address with everything known about it. One pool owns and changes it."""

    __slots__ = (
        "address",
        "id",
        "info",
        "is_draining",
        "knowledge",
        "last_pick",
        "ledger",
        "load",
        "load_s",
        "num_resets",
        "occupancy",
        "origin",
        "slot",
        "step_law",
        "telemetry_address",
    )

    def __init__(
        self,
        address: str,
        telemetry_address: str,
        slot: int,
        ledger: Ledger,
        origin: Origin | None = None,
    ) -> None:
        self.id = address
        self.address = address
        self.telemetry_address = telemetry_address
        self.origin = origin or Origin()
        self.slot = slot
        """Its bit in the prefix index; a new one whenever its blocks are forgotten."""
        self.ledger = ledger
        self.info: EngineInfo | None = None
        self.load: LoadView | None = None
        """The last report; None while nothing is known."""
        self.load_s = 0.0
        """When the last report came."""
        self.knowledge = Knowledge.NEW
        self.is_draining = False
        """Set by discovery; the engine's own word is `load.draining`."""
        self.step_law = StepLaw()
        self.last_pick = 0
        """The pool's running count of picks when this one was picked last; 0: never."""
        self.occupancy: tuple[int, Occupancy] | None = None
        """What `occupancy` derived last, with the ledger's version that it holds for."""
        self.num_resets = 0
        """How often its blocks were forgotten: new epochs, gaps, lost streams."""

    def __repr__(self) -> str:
        return f"Endpoint({self.id}, {self.knowledge})"

    @property
    def name(self) -> str:
        """For people: the pod's name where there is one."""
        return self.origin.pod or self.id

    @property
    def is_ready(self) -> bool:
        """Whether the engine has said who it is, is ready, and is neither draining nor lost."""
        load = self.load
        if self.info is None or load is None or self.knowledge is Knowledge.LOST:
            return False
        return load.ready and not load.draining and not self.is_draining

    @property
    def is_routable(self) -> bool:
        """Whether it can be sent a request now, as a whole."""
        return self.is_ready and self.info is not None and self.info.role is not Role.PREFILL

    def take_load(self, load: LoadView, now_s: float) -> None:
        self.load = load
        self.load_s = now_s
        self.step_law.learn(load.step_time_s, load.running_tokens)
        numbers = self.info is not None and self.info.settles_by_number
        self.ledger.settle(load, now_s, by_number=numbers)

    def forget_load(self) -> None:
        self.load = None
        self.ledger.forget_report()

    def is_fresh(self, now_s: float, stale_after_s: float) -> bool:
        """Whether it is new, or has reported within `stale_after_s`."""
        if self.knowledge is Knowledge.LOST:
            return False
        return self.load is None or now_s - self.load_s <= stale_after_s

    def is_known(self, now_s: float, stale_after_s: float) -> bool:
        """Whether its last report can be taken for its load now."""
        return self.load is not None and self.is_fresh(now_s, stale_after_s)

    def restart(self) -> None:
        """Another epoch: a new process at the same address, which knows nothing of earlier
        requests."""
        self.ledger.orphan_all()
        self.load = None
        self.step_law = StepLaw()
        self.knowledge = Knowledge.NEW

    def report_age_s(self, now_s: float) -> float | None:
        return None if self.load is None else max(0.0, now_s - self.load_s)

    def to_dict(self, now_s: float, num_hashes: int) -> dict[str, Any]:
        """For `/debug/engines`; `num_hashes` is what the index holds of it."""
        info, load, ledger, origin = self.info, self.load, self.ledger, self.origin
        age_s = self.report_age_s(now_s)
        return {
            "id": self.id,
            "name": self.name,
            "service": origin.service or None,
            "pool": origin.pool or None,
            "revision": origin.revision or None,
            "role": info.role.value if info else None,
            "routable": self.is_routable,
            "address": self.address,
            "telemetry_address": self.telemetry_address,
            "knowledge": self.knowledge.value,
            "draining": self.is_draining or bool(load and load.draining),
            "ready": None if load is None else load.ready,
            "epoch": info.epoch.hex() if info else None,
            "model": info.served_model if info else None,
            "model_identity": info.model_identity if info else None,
            "engine": f"{info.engine_kind} {info.engine_version}".strip() if info else None,
            "report_age_s": None if age_s is None else round(age_s, 3),
            "running": load.running if load else None,
            "waiting": load.waiting if load else None,
            "queued_prefill_tokens": load.queued_prefill_tokens if load else None,
            "free_blocks": load.free_blocks if load else None,
            "evictable_blocks": load.evictable_blocks if load else None,
            "total_blocks": load.total_blocks if load else None,
            "prefill_tokens_per_s": load.prefill_tokens_per_s if load else None,
            "step_time_s": load.step_time_s if load else None,
            "held_hashes": num_hashes,
            "in_flight": ledger.in_flight,
            "unsettled": ledger.unsettled,
            "last_number": ledger.last_number,
            "resets": self.num_resets,
        }
