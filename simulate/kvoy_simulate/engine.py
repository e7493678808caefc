"""One process of an engine in virtual time: the real core and the real telemetry hub.

The loop is that of `kvoy_engine.loop.run_core`: commands are taken between steps, and reported at
once; a step's results come when its time has passed. Tokens go to the router that asked; only the
first and the last of a stream are events of their own, the others are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvoy_engine.batch import Batch, RunnerOutput
from kvoy_engine.core import EngineCore
from kvoy_engine.health import CoreWatch, Phase, Readiness
from kvoy_engine.messages import (
    AbortRequest,
    AddRequest,
    ChoiceStart,
    Command,
    SamplingParams,
    StepOutput,
    TokensOut,
)
from kvoy_engine.watch import WatchHub
from kvoy_engine.watch_stream import LiveState
from kvoy_router.endpoint import EngineInfo
from kvoy_simulate.clock import VirtualClock
from kvoy_simulate.job import Attempt
from kvoy_simulate.runner import VirtualRunner
from kvoy_simulate.scenario import EngineGroup

if TYPE_CHECKING:
    from kvoy_simulate.router import VirtualRouter

ROUTER_WAIT_S = 30.0
STALL_TIMEOUT_S = 10.0
MODEL = "virtual"

Said = list[tuple[Attempt, TokensOut]]
"""First and last outputs of streams, in order."""


class VirtualEngine:
    def __init__(
        self,
        clock: VirtualClock,
        name: str,
        group: EngineGroup,
        epoch: bytes,
        request_s: float,
        on_idle: Callable[[VirtualEngine], None],
    ) -> None:
        """`request_s`: the way back to a router. `on_idle` is called when a draining engine has
        nothing left."""
        self._clock = clock
        self.name = name
        self.group = group
        self.runner = VirtualRunner(group.step, group.core, group.speed)
        self.core = EngineCore(self.runner, group.core)
        self.readiness = Readiness(expect_router=True, router_wait_s=ROUTER_WAIT_S)
        self.readiness.on_loaded(clock.now_s)
        self.hub = WatchHub(self.readiness, clock.time)
        self.hub.load = self.core.load()
        self.info = _describe(group, epoch)
        self.is_alive = True
        self._watch = CoreWatch(STALL_TIMEOUT_S, group.core.max_num_batched_tokens)
        self._started_s = clock.now_s
        self._request_s = request_s
        self._on_idle = on_idle
        self._inbox: list[Command] = []
        self._attempts: dict[str, Attempt] = {}
        self._is_stepping = False
        self._hung_until_s = -math.inf

    @property
    def num_open(self) -> int:
        """Requests that it has and that have not ended."""
        return len(self._attempts)

    @property
    def is_draining(self) -> bool:
        return self.readiness.phase is Phase.DRAINING

    def hung_until_s(self) -> float | None:
        """Until when it does nothing; None: it works."""
        return self._hung_until_s if self._hung_until_s > self._clock.now_s else None

    def live_state(self) -> LiveState:
        now_s = self._clock.now_s
        return LiveState(
            uptime_s=now_s - self._started_s,
            last_step_age_s=self._watch.last_step_age_s(now_s),
            is_draining=self.is_draining,
            is_ready=self.hub.is_ready(),
            free_device_bytes=0,
        )

    # What routers send

    def accept(self, attempt: Attempt) -> None:
        """A request has arrived. While the engine drains it is turned away."""
        lease, router = attempt.lease, attempt.job.router
        self.hub.ledger.settle_through(router.router_id, lease.settled_through)
        if self.is_draining:
            self.hub.settle(router.router_id, lease.number)
            self._clock.after(self._request_s, router.on_turned_away, attempt)
            return
        attempt.engine = self
        self._attempts[attempt.request_id] = attempt
        self._watch.on_submit(self._clock.now_s)
        self._submit(_command(attempt, self.group.core.block_size, self._clock.now_s))

    def hang_up(self, attempt: Attempt) -> None:
        """The router has closed the request's connection."""
        if self._attempts.pop(attempt.request_id, None) is not None:
            self._submit(AbortRequest(attempt.request_id))
            self._note_idle()

    # What happens to it

    def hang(self, until_s: float) -> None:
        self._hung_until_s = max(self._hung_until_s, until_s)

    def drain(self) -> None:
        self.readiness.on_drain()
        self.hub.announce()
        self._note_idle()

    def end(self) -> list[Attempt]:
        """The process is gone. Returns the requests whose connections break."""
        self.is_alive = False
        broken = list(self._attempts.values())
        self._attempts.clear()
        return broken

    # The loop

    def _submit(self, command: Command) -> None:
        self._inbox.append(command)
        if not self._is_stepping:
            self._turn()

    def _turn(self) -> None:
        """Between two steps."""
        if not self.is_alive or self._is_held(self._turn):
            return
        self._is_stepping = False
        now_s, core = self._clock.now_s, self.core
        commands, self._inbox = self._inbox, []
        if commands:
            tokens = [out for command in commands for out in core.handle(command, now_s)]
            self._emit(core.report(now_s, tokens))
        if core.has_work:
            batch = core.schedule(now_s)
            output = self.runner.run(batch)
            self._is_stepping = True
            self._clock.after(output.duration_s, self._end_step, batch, output)

    def _end_step(self, batch: Batch, output: RunnerOutput) -> None:
        if not self.is_alive or self._is_held(self._end_step, batch, output):
            return
        self._is_stepping = False
        self._emit(self.core.update(batch, output, self._clock.now_s))
        self._turn()

    def _is_held(self, action: Callable[..., None], *arguments: object) -> bool:
        """Whether the process hangs; then the action comes when it goes on."""
        if self._hung_until_s <= self._clock.now_s:
            return False
        self._is_stepping = True
        self._clock.at(self._hung_until_s, action, *arguments)
        return True

    def _emit(self, output: StepOutput) -> None:
        attempts, now_s = self._attempts, self._clock.now_s
        said: dict[VirtualRouter, Said] = {}
        for out in output.tokens:
            attempt = attempts.get(out.request_id)
            if attempt is None:
                continue  # its router has hung up
            if out.token_ids:
                attempt.num_tokens += 1
                attempt.heard_s = now_s
            if out.finish_reason is not None:
                del attempts[out.request_id]
            elif attempt.num_tokens > 1:
                continue
            said.setdefault(attempt.job.router, []).append((attempt, out))
        self._watch.on_output(output.load, output.now_s, is_outstanding=bool(attempts))
        self.hub.on_step(output)
        for router, items in said.items():
            self._clock.after(self._request_s, router.on_said, items)
        self._note_idle()

    def _note_idle(self) -> None:
        if self.is_draining and not self._attempts and self.is_alive:
            self._on_idle(self)


def _command(attempt: Attempt, block_size: int, now_s: float) -> AddRequest:
    """What the engine's server makes of a request that goes on after its output so far."""
    job = attempt.job
    request = job.request
    return AddRequest(
        request_id=attempt.request_id,
        prompt_ids=range(request.num_prompt_tokens),
        params=SamplingParams(max_tokens=request.max_tokens),
        seed_hash=b"",
        choices=[ChoiceStart(0, [0] * job.output_tokens)],
        arrival_s=now_s,
        priority=job.engine_priority,
        router_id=job.router.router_id,
        number=attempt.lease.number,
        known_hashes=request.prompt_and_answer().hashes(block_size),
    )


def _describe(group: EngineGroup, epoch: bytes) -> EngineInfo:
    core = group.core
    return EngineInfo(
        epoch=epoch,
        served_model=MODEL,
        block_size=core.block_size,
        hash_stride=core.hash_stride,
        num_blocks=core.num_blocks,
        max_model_len=core.token_limit,
        max_num_seqs=core.max_num_seqs,
        max_num_batched_tokens=core.max_num_batched_tokens,
        numerics="virtual",
        engine_kind="kvoy",
        takes_envelope=True,
        gives_token_ids=True,
        can_resume=True,
        settles_by_number=True,
    )
