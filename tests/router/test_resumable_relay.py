"""What is remembered of a stream is what its client has: at every byte where an engine may die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy_contract.sse import DONE, ChoiceIds, data_event, token_ids_event
from kvoy_router.errors import ConnectionBroken, EngineErrored, UpstreamError
from kvoy_router.failover import GaveUp
from kvoy_router.http_client import Exchange
from kvoy_router.http_response import Response
from kvoy_router.resumable_relay import ResumableRelay
from kvoy_router.resume_memory import ResumeMemory
from kvoy_router.stream_progress import StreamProgress
from kvoy_router.upstream_connection import is_one_chunk

CHUNK = b'{"choices":[{"index":%d,"text":"%b","logprobs":null,"finish_reason":null}]}'
TAIL = data_event(b'{"choices":[],"usage":{"completion_tokens":9}}') + DONE


def chunk(choice: int, text: bytes) -> bytes:
    return data_event(CHUNK % (choice, text))


WRITES = [
    (chunk(0, b"a"), [ChoiceIds(0, [5])]),
    (chunk(0, b"b") + chunk(1, b"x"), [ChoiceIds(0, [6, 7]), ChoiceIds(1, [])]),
    (b"", [ChoiceIds(1, [70_000])]),
    (chunk(1, rb"\n: kvoy-ids 0 9\n\n"), [ChoiceIds(1, [8])]),
    (chunk(1, b": kvoy-ids 0 9"), [ChoiceIds(1, [80])]),
    (chunk(0, b"c"), [ChoiceIds(0, [9], is_ended=True)]),
]
"""What a write tells the client, and the ids that close it."""


class Upstream:
    """An engine's chunked answer in given reads, then a break, where the relay expects an
    exchange."""

    media_type = b"text/event-stream"

    def __init__(self, reads: list[bytes], *, breaks: bool) -> None:
        self._reads = reads
        self._breaks = breaks
        self.connection = SimpleNamespace(
            pause_reading=lambda: None, resume_reading=lambda: None, fail=self._fail
        )
        self.failure: UpstreamError | None = None

    def _fail(self, error: UpstreamError) -> None:
        self.failure = error

    async def relay(
        self, sink: Callable[[bytes], None], frame_sink: Callable[[bytes], None]
    ) -> None:
        for read in self._reads:
            if is_one_chunk(read):
                frame_sink(read)
            else:
                sink(read)
            if self.failure is not None:
                raise self.failure
        await asyncio.sleep(0)
        if self._breaks:
            raise ConnectionBroken("it closed the connection")


class Client:
    takes_frames = True
    is_paused = False

    def __init__(self) -> None:
        self.seen = b""
        self.status = 0

    def start(self, status: int, headers: object) -> None:
        self.status = status

    def write(self, data: bytes) -> None:
        self.seen += data

    def write_frame(self, frame: bytes) -> None:
        assert is_one_chunk(frame)
        assert self.status, "a frame needs a head before it"
        self.write(frame[frame.find(b"\r\n") + 2 : -2])


def progress_of(max_bytes: int = 1 << 20) -> StreamProgress:
    return StreamProgress("id", 1, max_bytes, ResumeMemory(1 << 20))


async def run(upstream: Upstream, progress: StreamProgress) -> Client:
    client = Client()
    relay = ResumableRelay(
        cast(Exchange, cast(Any, upstream)),
        cast(Response, cast(Any, client)),
        [],
        lambda: None,
        progress,
    )
    try:
        await relay.run()
    except ConnectionBroken:
        assert upstream.failure is not None or DONE not in client.seen
    return client


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def told_after(num_writes: int) -> tuple[bytes, list[list[int]], list[int], list[int]]:
    """The client's bytes and the state after so many whole writes."""
    ids: list[list[int]] = [[], []]
    begun, ended = set(), set()
    for _, said in WRITES[:num_writes]:
        for choice, token_ids, is_ended in said:
            ids[choice] += token_ids
            begun.add(choice)
            ended |= {choice} if is_ended else set()
    return b"".join(told for told, _ in WRITES[:num_writes]), ids, sorted(begun), sorted(ended)


def assert_told(client: Client, progress: StreamProgress, num_writes: int) -> None:
    seen, ids, begun, ended = told_after(num_writes)
    assert client.seen == seen
    assert progress.prepare_resume(2) is None
    assert progress.resume is not None
    assert progress.resume.output_ids == ids
    assert progress.resume.begun == begun
    assert progress.resume.ended == ended


async def test_a_write_in_one_read_is_told_at_once_without_its_ids() -> None:
    for num_writes in range(len(WRITES) + 1):
        reads = [framed(told + token_ids_event(said)) for told, said in WRITES[:num_writes]]
        progress = progress_of()

        client = await run(Upstream(reads, breaks=True), progress)

        assert_told(client, progress, num_writes)


@given(data=st.data())
def test_what_is_remembered_is_what_the_client_has_wherever_the_stream_breaks(
    data: st.DataObject,
) -> None:
    writes = [told + token_ids_event(said) for told, said in WRITES]
    stream = b"".join(writes)
    end = data.draw(st.integers(0, len(stream)))
    cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=6)))
    reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, end], strict=True)]
    progress = progress_of()

    client = asyncio.run(run(Upstream(reads, breaks=True), progress))

    num_whole, size = 0, 0
    while num_whole < len(writes) and size + len(writes[num_whole]) <= end:
        size += len(writes[num_whole])
        num_whole += 1
    assert_told(client, progress, num_whole)


@pytest.mark.parametrize("breaks", [False, True], ids=["ends", "breaks behind its end mark"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_whole_stream_arrives_without_the_ids(size: int, breaks: bool) -> None:
    stream = b"".join(told + token_ids_event(said) for told, said in WRITES) + TAIL
    reads = [stream[i : i + size] for i in range(0, len(stream), size)]

    client = await run(Upstream(reads, breaks=breaks), progress_of())

    assert client.seen == told_after(len(WRITES))[0] + TAIL


@pytest.mark.parametrize("num_missing", range(1, len(DONE) + 1))
async def test_a_stream_that_breaks_within_its_end_mark_has_ended_or_not(num_missing: int) -> None:
    stream = b"".join(told + token_ids_event(said) for told, said in WRITES) + TAIL
    progress = progress_of()

    client = await run(Upstream([stream[:-num_missing]], breaks=True), progress)

    if num_missing <= len(b"\n\n"):  # only the end of the last line
        assert client.seen == told_after(len(WRITES))[0] + TAIL
    else:
        assert_told(client, progress, len(WRITES))


async def test_the_end_in_the_chunk_of_the_last_ids_is_told() -> None:
    *first, (told, said) = WRITES
    reads = [framed(told + token_ids_event(said)) for told, said in first]
    reads.append(framed(told + token_ids_event(said) + TAIL))

    client = await run(Upstream(reads, breaks=False), progress_of())

    assert client.seen == told_after(len(WRITES))[0] + TAIL


async def test_a_chunk_of_several_writes_is_told_without_any_of_their_ids() -> None:
    reads = [
        framed(b"".join(told + token_ids_event(said) for told, said in some))
        for some in (WRITES[:1], WRITES[1:3], WRITES[3:])
    ]
    progress = progress_of()

    client = await run(Upstream(reads, breaks=True), progress)

    assert_told(client, progress, len(WRITES))


async def test_an_engines_own_error_is_not_shown_but_raised() -> None:
    told, said = WRITES[0]
    error = b'data: {"error":{"message":"This engine shuts down."}}\n\n'
    upstream = Upstream([told + token_ids_event(said) + error], breaks=False)
    progress = progress_of()

    with pytest.raises(EngineErrored, match="shuts down"):
        await run(upstream, progress)

    assert progress.prepare_resume(1) is None


async def test_more_than_is_allowed_is_not_remembered_and_still_told() -> None:
    reads = [framed(told + token_ids_event(said)) for told, said in WRITES]
    progress = progress_of(max_bytes=10)

    client = await run(Upstream(reads, breaks=True), progress)

    assert client.seen == told_after(len(WRITES))[0]
    assert progress.prepare_resume(2) is GaveUp.TOO_LONG
    assert not progress.said


@pytest.mark.parametrize("said", [b"0 1,x", b"0", b"7 1", b"x 1", b";"])
async def test_malformed_ids_are_no_ground_to_go_on(said: bytes) -> None:
    progress = progress_of()

    await run(Upstream([b"data: {}\n\n: kvoy-ids " + said + b"\n\n"], breaks=True), progress)

    if said == b"0":
        assert progress.prepare_resume(2) is None
    else:
        assert progress.prepare_resume(2) is GaveUp.MALFORMED
