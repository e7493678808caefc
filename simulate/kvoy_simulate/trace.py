"""Replay of request traces in the Mooncake format, and traces of that format made up by seed.

A trace is one JSON object a line: `timestamp` (milliseconds), `input_length` and `output_length`
(tokens), `hash_ids` (one per 512 tokens of the prompt; an id stands for a block and all before it,
so equal ids are equal beginnings). Lines end in order of time. A `.gz` file is unpacked.
(Qin et al., Mooncake, FAST '25.)
"""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random

import msgspec

from kvoy_simulate.traffic import PromptSpec, SimRequest, Workload
from kvoy_simulate.workloads import Description, OpenLoop

BLOCK_TOKENS = 512


class Record(msgspec.Struct, frozen=True, gc=False):
    """One line; other keys are ignored."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceError(ValueError):
    """A trace that cannot be read; the message names file, line and field."""


class Generated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A made-up trace: conversations over long documents, and their follow-up questions."""

    rate: float = 4.0
    """Requests per second."""
    duration_s: float = 300.0
    mean_turns: float = 3.0
    document_tokens: tuple[int, int] = (2_000, 30_000)
    """Bounds of a conversation's beginning; the logarithm is evenly distributed."""
    turn_tokens: tuple[int, int] = (200, 2_000)
    output_tokens: tuple[int, int] = (20, 400)
    mean_pause_s: float = 20.0
    """Between the turns of a conversation."""

    def __post_init__(self) -> None:
        for name in ("rate", "duration_s", "mean_pause_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.mean_turns < 1:
            raise ValueError(f"mean_turns must be at least 1, not {self.mean_turns}")
        for name in ("document_tokens", "turn_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name} must be at least 1, the lower bound first")


class Trace(Description, frozen=True, tag_field="kind", tag="trace"):
    file: str | None = None
    """A trace; without it one is generated."""
    generate: Generated = Generated()
    speed: float = 1.0
    """2.0 replays twice as fast."""

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ValueError(f"speed must be above 0, not {self.speed}")

    def at_rate(self, rate: float) -> Trace:
        """A generated trace with another rate. Raises ValueError for a file, which has its own."""
        if self.file:
            raise ValueError("a trace file has its own rate: set speed")
        generated = msgspec.structs.replace(self.generate, rate=rate)
        return msgspec.structs.replace(self, generate=generated)

    def build(self, name: str, seed: int) -> Workload:
        """Raises TraceError for a file that cannot be read."""
        records = read_trace(Path(self.file)) if self.file else generate(self.generate, seed)
        return OpenLoop(self._requests(name, records))

    def _requests(self, name: str, records: Iterable[Record]) -> Iterator[SimRequest]:
        blocks: dict[int, PromptSpec] = {}
        first_ms: int | None = None
        for number, record in enumerate(records):
            if first_ms is None:
                first_ms = record.timestamp
            prompt, group = _prompt(name, number, record, blocks)
            yield SimRequest(
                (record.timestamp - first_ms) / 1000.0 / self.speed,
                prompt,
                max(1, record.output_length),
                session=f"{name}/{group}",
                group=f"{name}/{group}",
                priority=self.priority,
                tenant=self.tenant,
            )


def _prompt(
    name: str, number: int, record: Record, blocks: dict[int, PromptSpec]
) -> tuple[PromptSpec, str]:
    """The prompt, and the name of its beginning. The last block has as many tokens as are left."""
    tail_tokens = record.input_length
    parent: PromptSpec | None = None
    for hash_id in record.hash_ids:
        if tail_tokens <= BLOCK_TOKENS:
            break
        tail_tokens -= BLOCK_TOKENS
        node = blocks.get(hash_id)
        if node is None or node.parent is not parent:
            node = blocks[hash_id] = PromptSpec(parent, f"{name}/b{hash_id}", BLOCK_TOKENS)
        parent = node
    first = f"b{record.hash_ids[0]}" if record.hash_ids else f"r{number}"
    last = f"{name}/b{record.hash_ids[-1]}" if record.hash_ids else f"{name}/r{number}"
    return PromptSpec(parent, last, max(1, tail_tokens)), first


def read_trace(path: Path) -> list[Record]:
    """All of it, so that an error comes before anything is simulated.

    Raises TraceError when the file is missing, a line is no record, or time runs backwards.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            return list(_parse(path, lines))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except EOFError as error:
        raise TraceError(f"{path}: the packed file is cut short") from error


def _parse(path: Path, lines: Iterable[bytes]) -> Iterator[Record]:
    decoder = msgspec.json.Decoder(Record)
    latest_ms = -1
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path} line {number}: {error}") from error
        if record.timestamp < latest_ms:
            raise TraceError(f"{path} line {number}: timestamp runs backwards")
        latest_ms = record.timestamp
        yield record


def write_trace(path: Path, records: Iterable[Record]) -> int:
    """Write all, packed when the name ends in `.gz`; how many there were."""
    num_written = 0
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as out:
        for record in records:
            out.write(msgspec.json.encode(record) + b"\n")
            num_written += 1
    return num_written


def generate(description: Generated, seed: int) -> Iterator[Record]:
    """Records in order of time until `duration_s`."""
    random = Random(f"trace-{seed}")
    ids = count()
    pending: list[tuple[float, int, _Talk]] = []
    order = count()
    next_start_s = 0.0
    start_rate = description.rate / description.mean_turns
    while True:
        if not pending or next_start_s <= pending[0][0]:
            talk = _Talk.begin(description, random, ids)
            heapq.heappush(pending, (next_start_s, next(order), talk))
            next_start_s += random.expovariate(start_rate)
            continue
        now_s, _, talk = heapq.heappop(pending)
        if now_s >= description.duration_s:
            return
        output_tokens = random.randint(*description.output_tokens)
        yield Record(round(now_s * 1000), talk.tokens, output_tokens, list(talk.block_ids))
        if random.random() >= 1.0 / description.mean_turns:
            talk.grow(output_tokens + random.randint(*description.turn_tokens), ids)
            pause_s = random.expovariate(1.0 / description.mean_pause_s)
            heapq.heappush(pending, (now_s + pause_s, next(order), talk))


class _Talk:
    """One conversation's prompt so far. Its last, partial block gets a new id when it grows: it is
    then another block."""

    __slots__ = ("block_ids", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.block_ids: list[int] = []

    @classmethod
    def begin(cls, description: Generated, random: Random, ids: Iterator[int]) -> _Talk:
        low, high = description.document_tokens
        talk = cls()
        talk.grow(round(low * (high / low) ** random.random()), ids)
        return talk

    def grow(self, tokens: int, ids: Iterator[int]) -> None:
        del self.block_ids[self.tokens // BLOCK_TOKENS :]
        self.tokens += tokens
        while len(self.block_ids) * BLOCK_TOKENS < self.tokens:
            self.block_ids.append(next(ids))


def unbounded_hit_share(records: Sequence[Record]) -> float:
    """Share of blocks that a cache without bounds would already hold."""
    seen: set[int] = set()
    num_blocks = num_hits = 0
    for record in records:
        num_blocks += len(record.hash_ids)
        num_hits += sum(hash_id in seen for hash_id in record.hash_ids)
        seen.update(record.hash_ids)
    return num_hits / num_blocks if num_blocks else 0.0
