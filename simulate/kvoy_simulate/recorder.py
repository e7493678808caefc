"""Writes the columns and series of an outcome while the simulation runs."""

from __future__ import annotations

from kvoy_simulate.engine import VirtualEngine
from kvoy_simulate.job import Job
from kvoy_simulate.outcome import NEVER, EngineSeries, RequestColumns, Status
from kvoy_simulate.traffic import SimRequest


class Recorder:
    def __init__(self) -> None:
        self.requests = RequestColumns()
        self.series: list[EngineSeries] = []
        self.names: dict[str, int] = {}
        self.num_open = 0
        """Requests that have begun and not ended."""
        self._positions: dict[str, int] = {}
        """Engine name → position of the series of its latest process."""

    # Requests

    def add(self, request: SimRequest, router: int) -> int:
        """A request sets out; returns its row."""
        columns = self.requests
        columns.arrival_s.append(request.arrival_s)
        for times in (columns.sent_s, columns.first_token_s, columns.end_s):
            times.append(NEVER)
        columns.prompt_tokens.append(request.num_prompt_tokens)
        for counts in (columns.cached_tokens, columns.predicted_tokens, columns.output_tokens):
            counts.append(0)
        columns.engine.append(-1)
        columns.router.append(router)
        columns.session.append(self._name(request.session))
        columns.group.append(self._name(request.group))
        columns.tenant.append(self._name(request.tenant))
        columns.priority.append(request.priority)
        columns.retries.append(0)
        columns.resumes.append(0)
        columns.status.append(Status.UNFINISHED)
        self.num_open += 1
        return len(columns) - 1

    def on_sent(self, job: Job, engine: str, predicted_tokens: int, now_s: float) -> None:
        columns, row = self.requests, job.row
        columns.engine[row] = self._positions[engine]
        if job.num_attempts == 1:
            columns.sent_s[row] = now_s
        elif job.output_tokens:
            columns.resumes[row] += 1
        else:
            columns.retries[row] += 1
        if not job.output_tokens:
            columns.predicted_tokens[row] = predicted_tokens

    def on_first_token(self, job: Job, cached_tokens: int, now_s: float) -> None:
        self.requests.first_token_s[job.row] = now_s
        self.requests.cached_tokens[job.row] = cached_tokens

    def on_end(self, row: int, status: Status, output_tokens: int, now_s: float) -> None:
        columns = self.requests
        columns.end_s[row] = now_s
        columns.output_tokens[row] = output_tokens
        columns.status[row] = status
        self.num_open -= 1

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    # Engines

    def on_engine_start(self, engine: VirtualEngine, now_s: float) -> None:
        core = engine.group.core
        self._positions[engine.name] = len(self.series)
        self.series.append(
            EngineSeries(engine.name, engine.group.name, now_s, core.num_blocks, core.block_size)
        )

    def on_engine_end(self, engine: VirtualEngine, now_s: float) -> None:
        self.series[self._positions[engine.name]].ended_s = now_s

    def sample(self, engine: VirtualEngine, now_s: float) -> None:
        series = self.series[self._positions[engine.name]]
        load = engine.core.load()
        series.times_s.append(now_s)
        series.running.append(load.running)
        series.waiting.append(load.waiting)
        series.used_blocks.append(load.total_blocks - load.free_blocks - load.evictable_blocks)
        series.cached_blocks.append(load.evictable_blocks)
        series.queued_tokens.append(load.queued_prefill_tokens)
        series.generated_tokens.append(load.generated_tokens)
