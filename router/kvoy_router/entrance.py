"""What stands between a request and the engines: its key, its limits, and its turn.

`access` says who it is from, `keys_limits` whether that one may ask now, `flow_gate` when it may go
on. What it used is charged when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvoy_contract.errors import ApiError, Unauthorized
from kvoy_router.access import Access, Client
from kvoy_router.decision import Decision
from kvoy_router.dispatch import Job
from kvoy_router.flow_gate import Admission, FlowGate
from kvoy_router.flow_ticket import Line, Stage, Ticket
from kvoy_router.http_message import Headers, Request
from kvoy_router.keys import Keyring
from kvoy_router.keys_limits import KeyLimits
from kvoy_router.metrics import Metrics
from kvoy_router.model import FIRST_OUTPUT_TOKENS
from kvoy_router.pool import Pool
from kvoy_router.record import RequestRecord


class Entrance:
    def __init__(
        self,
        access: Access,
        gate: FlowGate,
        pool: Pool,
        metrics: Metrics,
        now_s: Callable[[], float],
    ) -> None:
        self._access = access
        self._gate = gate
        self._pool = pool
        self._metrics = metrics
        self._now_s = now_s
        self._limits = KeyLimits()

    def use_keys(self, keyring: Keyring) -> None:
        """These and no others, from now on."""
        self._access.keyring = keyring
        self._limits.keep_only(keyring.by_id)
        self._metrics.tenants.keep_only(keyring.tenants)

    @property
    def has_waiting(self) -> bool:
        """Whether some request waits for room."""
        return self._gate.flow.num_waiting > 0

    def use_objectives(self, objectives: Mapping[str, int]) -> None:
        """From now on; see `Access`."""
        self._access.objectives = objectives

    def identify(self, request: Request) -> Client:
        """Raises Unauthorized or BadRequest."""
        try:
            return self._access.identify(request)
        except Unauthorized as error:
            self._metrics.tenants.on_unauthorized(error.code or "")
            raise

    def check_key(self, headers: Headers) -> None:
        """Of a request whose body has not come. Raises Unauthorized."""
        try:
            self._access.check_key(headers)
        except Unauthorized as error:
            self._metrics.tenants.on_unauthorized(error.code or "")
            raise

    def begin(self, request: Request, record: RequestRecord) -> Client:
        """As `identify`, and counted against the key's limits. Raises Saturated beyond them."""
        client = self.identify(request)
        record.client = client
        if client.key is not None:
            self._limits.take_request(client.key, self._now_s())
            record.is_charged = True
        return client

    def admit(self, job: Job, record: RequestRecord) -> Admission:
        """The request's turn to go on; see `FlowGate.admit`."""
        ticket = Ticket(
            Line(job.model, job.service),
            tokens=job.prompt.num_tokens + self._expected_output(job),
            arrived_s=record.started_s,
            tenant=record.client.tenant,
            priority=job.inference.priority,
            weight=record.client.weight,
        )
        return self._gate.admit(ticket)

    def note_wait(self, record: RequestRecord, came_s: float) -> None:
        """It is let in, had to wait, and came to the gate at `came_s`."""
        record.queued_s = self._now_s() - came_s
        self._metrics.flow.on_waited(record.model, record.queued_s)

    def start(self, admission: Admission, job: Job, decision: Decision) -> None:
        """Its load is reserved: from now on its tenant is charged what is to be computed."""
        admission.prefill_tokens = decision.lease.prefill_tokens
        admission.start(admission.prefill_tokens + self._expected_output(job))

    def settle(self, admission: Admission, record: RequestRecord) -> None:
        """Its answer is over: its tenant is charged what it has come to."""
        if record.output_tokens is not None and admission.ticket.stage is Stage.STARTED:
            admission.correct(max(admission.prefill_tokens + record.output_tokens, 1.0))

    def end(self, record: RequestRecord) -> None:
        """Count what a request has used against its key and for its tenant."""
        key = record.client.key
        if key is None:
            return
        if record.is_charged and not record.engine and record.status in _NOT_SERVED:
            self._limits.give_back_request(key, self._now_s())
        prompt_tokens = record.prompt_tokens if record.first_byte_s is not None else 0
        output_tokens = record.output_tokens
        if output_tokens is None:
            output_tokens = round(self._output_tokens(record.model)) if prompt_tokens else 0
        self._limits.take_tokens(key, prompt_tokens + output_tokens, self._now_s())
        self._metrics.tenants.on_request(
            key.tenant, record.model, record.outcome, prompt_tokens, output_tokens
        )

    def _expected_output(self, job: Job) -> float:
        tokens = self._output_tokens(job.model)
        limit = job.inference.max_tokens
        if limit is not None:
            tokens = min(tokens, float(limit))
        return max(tokens, 1.0) * job.inference.num_choices

    def _output_tokens(self, model: str) -> float:
        """An answer's expected length: what is charged where an engine does not tell."""
        try:
            return self._pool.output_tokens(model)
        except ApiError:
            return FIRST_OUTPUT_TOKENS  # its last engine has just gone


_NOT_SERVED = frozenset({429, 503, 504})
"""Turned away before any engine was asked: no engine, no room, or no turn in time."""
