"""A fleet of stand-in engines whose streams are numbered event by event: what the soak drives a
router with.

`python -m kvoy_cli.bench.soak.source --count N --gap-s G [--tokenizer FOLDER]` starts N of them in
one process and prints their addresses as `fake_engine` does. Every engine has a step each `gap_s`,
in which each of its streams has one event; the engines' steps are spread evenly. A stream is called
what its request's `user` says.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvoy_cli.bench import fake_answers
from kvoy_cli.bench.event_loop import run
from kvoy_cli.bench.fake_engine import EngineConnection, FakeEngine, Steps, serve
from kvoy_cli.bench.soak import numbered
from kvoy_contract import sse
from kvoy_contract.prompt import TokenizerFiles, byte_tokenizer_files
from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb

_IDS = fake_answers.http_chunk(sse.token_ids_event([sse.ChoiceIds(0, [1234])]))


class NumberedConnection(EngineConnection):
    """One router's connection; a stream's events tell its label and their number."""

    def start_stream(self, chat: bool, request: fake_answers.Body, wants_ids: bool) -> None:
        self._label = request.user
        self._ids = _IDS if wants_ids else b""
        self._number = 0
        super().start_stream(chat, request, wants_ids)

    def next_event(self) -> bytes:
        event = fake_answers.http_chunk(numbered.event(self._label, self._number))
        self._number += 1
        return event + self._ids


class NumberedEngine(FakeEngine):
    def __init__(self, tokenizer: TokenizerFiles, gap_s: float, phase_s: float) -> None:
        super().__init__(tokenizer, 0, gap_s)
        self.steps = Steps(gap_s, phase_s)
        self.heartbeat_s = max(gap_s, 0.02)
        self._gap_s = gap_s

    def connection(self) -> NumberedConnection:
        return NumberedConnection(self)

    def load_report(self, router_id: str) -> pb.LoadReport:
        """As busy as its streams make it."""
        report = super().load_report(router_id)
        report.running = self.steps.num_running
        report.step_time_s = self._gap_s
        report.uptime_s = time.monotonic()
        return report


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="source")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--gap-s", type=float, default=0.25)
    parser.add_argument("--tokenizer", type=Path, default=None)
    return parser.parse_args(argv)


async def _serve(options: argparse.Namespace) -> None:
    folder: Path | None = options.tokenizer
    tokenizer = byte_tokenizer_files() if folder is None else TokenizerFiles.from_folder(folder)
    count, gap_s = options.count, options.gap_s
    await serve([NumberedEngine(tokenizer, gap_s, gap_s * at / count) for at in range(count)])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        run(_serve(_parse(sys.argv[1:])))
