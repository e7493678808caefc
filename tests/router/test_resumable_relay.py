"""What is remembered of a stream is what its client has: at every byte where an engine may die, and
however its bytes come in."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy_contract.sse import DONE, ChoiceIds, data_event, token_ids_event
from kvoy_router.errors import ConnectionBroken, EngineErrored
from kvoy_router.failover import GaveUp
from kvoy_router.http_client import Exchange
from kvoy_router.http_message import Request
from kvoy_router.http_response import Response
from kvoy_router.resumable_relay import ResumableRelay
from kvoy_router.resume_memory import ResumeMemory
from kvoy_router.stream_progress import StreamProgress
from kvoy_router.upstream_connection import UpstreamConnection

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b'{"choices":[{"index":%d,"text":"%b","logprobs":null,"finish_reason":null}]}'
TAIL = data_event(b'{"choices":[],"usage":{"completion_tokens":9}}') + DONE


def chunk(choice: int, text: bytes) -> bytes:
    return data_event(CHUNK % (choice, text))


Write = tuple[bytes, list[ChoiceIds]]
"""What it tells the client, and the ids that close it."""

WRITES: list[Write] = [
    (chunk(0, b"a"), [ChoiceIds(0, [5])]),
    (chunk(0, b"b") + chunk(1, b"x"), [ChoiceIds(0, [6, 7]), ChoiceIds(1, [])]),
    (b"", [ChoiceIds(1, [70_000])]),
    (chunk(1, rb"\n: kvoy-ids 0 9\n\n"), [ChoiceIds(1, [8])]),
    (chunk(1, b": kvoy-ids 0 9"), [ChoiceIds(1, [80])]),
    (chunk(0, b"y" * 5000), [ChoiceIds(0, [81])]),
    (chunk(0, b"z"), [ChoiceIds(0, [12_345_678])]),
    (chunk(0, rb"16\r\n: kvoy-ids 0 0000001\n\n\r\n"), [ChoiceIds(0, [82])]),
    (chunk(0, b"c"), [ChoiceIds(0, [9], is_ended=True)]),
]


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def sent(write: Write) -> bytes:
    """As an engine sends it: the ids in a chunk of their own."""
    told, said = write
    return framed(told) + framed(token_ids_event(said))


class Upstream:
    """The transport to an engine. Like uvloop's it asks for the protocol's callback when it is
    given the protocol, and not at each read."""

    def __init__(self) -> None:
        self.is_closed = False
        self.num_long = 0
        """Reads that were parsed."""

    def set_protocol(self, connection: UpstreamConnection) -> None:
        self._read = connection.data_received
        self._is_long = connection.data_received == connection._parse

    def feed(self, data: bytes) -> None:
        if data and not self.is_closed:
            self.num_long += self._is_long
            self._read(data)

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def abort(self) -> None:
        self.is_closed = True


class Client:
    """The connection and the transport to the client."""

    is_write_paused = False

    def __init__(self) -> None:
        self.sent = b""
        self.server = cast(Any, self)
        self.date = b"now"
        self.is_draining = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        raise AssertionError("the client is cut off")

    @property
    def seen(self) -> bytes:
        """The body so far; every write ended where a chunk ends."""
        rest = self.sent.partition(b"\r\n\r\n")[2]
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            assert rest[int(size, 16) :].startswith(b"\r\n")
            rest = rest[int(size, 16) + 2 :]
        return body


def progress_of(max_bytes: int = 1 << 20) -> StreamProgress:
    return StreamProgress("id", 1, max_bytes, ResumeMemory(1 << 20))


def relay_of(
    connection: UpstreamConnection,
    client: Client,
    progress: StreamProgress,
    *,
    is_http_1_0: bool = False,
) -> ResumableRelay:
    request = Request("POST", b"/", [], is_http_1_0=is_http_1_0)
    return ResumableRelay(
        Exchange(cast(Any, None), "engine", connection, 60.0),
        Response(cast(Any, client), cast(Any, client), request),
        [],
        lambda: None,
        progress,
    )


async def run(
    reads: list[bytes], progress: StreamProgress, *, is_http_1_0: bool = False
) -> tuple[Client, Upstream]:
    """An engine's answer in these reads, the head apart, and then the end of the connection."""
    client, transport, connection = Client(), Upstream(), UpstreamConnection()
    transport.set_protocol(connection)
    connection.connection_made(cast(Any, transport))
    transport.feed(HEAD)
    relay = relay_of(connection, client, progress, is_http_1_0=is_http_1_0)
    running = asyncio.create_task(relay.run())
    await asyncio.sleep(0)
    for read in reads:
        transport.feed(read)
    if not connection.done.done():
        connection.connection_lost(None)
    try:
        await running
    except ConnectionBroken:
        assert DONE not in client.seen
    return client, transport


def told_after(
    num_writes: int, writes: list[Write] = WRITES
) -> tuple[bytes, list[list[int]], list[int], list[int]]:
    """The client's bytes and the state after so many whole writes."""
    ids: list[list[int]] = [[], []]
    begun, ended = set(), set()
    for _, said in writes[:num_writes]:
        for choice, token_ids, is_ended in said:
            ids[choice] += token_ids
            begun.add(choice)
            ended |= {choice} if is_ended else set()
    return b"".join(told for told, _ in writes[:num_writes]), ids, sorted(begun), sorted(ended)


def assert_told(
    client: Client, progress: StreamProgress, num_writes: int, writes: list[Write] = WRITES
) -> None:
    seen, ids, begun, ended = told_after(num_writes, writes)
    assert client.seen == seen
    assert progress.num_told_tokens == sum(map(len, ids))
    assert progress.prepare_resume(2) is None
    assert progress.resume is not None
    assert progress.resume.output_ids == ids
    assert progress.resume.begun == begun
    assert progress.resume.ended == ended


async def test_a_write_in_one_read_is_told_at_once_without_its_ids() -> None:
    for num_writes in range(len(WRITES) + 1):
        progress = progress_of()

        client, _ = await run([sent(write) for write in WRITES[:num_writes]], progress)

        assert_told(client, progress, num_writes)


async def test_usual_writes_are_not_parsed_however_many_come_in_a_read() -> None:
    writes: list[Write] = [(chunk(0, b"t%d" % i), [ChoiceIds(0, [i])]) for i in range(40)]
    sizes = [1, 1, 1, 3, 1, 2, 30, 1]
    reads = [b"".join(map(sent, writes[sum(sizes[:i]) :][:n])) for i, n in enumerate(sizes)]
    progress = progress_of()

    client, transport = await run(reads, progress)

    assert transport.num_long == 2  # the head, and the first read
    assert_told(client, progress, 40, writes)


async def test_what_took_the_short_cut_is_a_sign_of_life_at_the_next_look() -> None:
    start_s = now_s = asyncio.get_running_loop().time()
    connection = UpstreamConnection()
    connection._time = lambda: now_s
    client, transport, progress = Client(), Upstream(), progress_of()
    transport.set_protocol(connection)
    connection.connection_made(cast(Any, transport))
    transport.feed(HEAD)
    relay = relay_of(connection, client, progress)
    running = asyncio.create_task(relay.run())
    await asyncio.sleep(0)
    transport.feed(sent(WRITES[0]))
    assert connection.last_data_s == start_s
    now_s = start_s + 5
    connection.look()
    assert connection.last_data_s == start_s, "nothing came"
    transport.feed(sent(WRITES[0]))
    connection.look()
    assert connection.last_data_s == start_s + 5
    now_s = start_s + 10
    connection.look()
    assert connection.last_data_s == start_s + 5
    running.cancel()


async def test_nothing_is_written_to_a_client_that_has_gone() -> None:
    connection, client, transport = UpstreamConnection(), Client(), Upstream()
    transport.set_protocol(connection)
    connection.connection_made(cast(Any, transport))
    transport.feed(HEAD)
    relay = relay_of(connection, client, progress_of())
    running = asyncio.create_task(relay.run())
    await asyncio.sleep(0)
    transport.feed(sent(WRITES[0]) + sent(WRITES[0]))
    relay._response.lose()
    transport.feed(sent(WRITES[0]))
    running.cancel()

    assert client.seen == 2 * WRITES[0][0]


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    reads = [*map(sent, WRITES), framed(TAIL) + b"0\r\n\r\n"]

    client, transport = await run(reads, progress_of(), is_http_1_0=True)

    assert client.sent.endswith(b"\r\n\r\n" + told_after(len(WRITES))[0] + TAIL)
    assert transport.num_long == 1 + len(reads)


usual_writes = st.builds(
    lambda text, token_id: (chunk(0, text), [ChoiceIds(0, [token_id])]),
    st.sampled_from([b"a", b" word", rb"\n\n", b": kvoy-ids 0 0000001", b"x" * 300, b"y" * 4100]),
    st.integers(0, 200_000),
)


@given(data=st.data())
def test_what_is_remembered_is_what_the_client_has_wherever_the_stream_breaks(
    data: st.DataObject,
) -> None:
    """Cuts where a write or a chunk ends are frequent, so that reads take turns between the short
    cut and the parser."""
    writes = data.draw(
        st.lists(st.one_of(usual_writes, st.sampled_from(WRITES[:8])), max_size=12), "writes"
    )
    pieces = [framed(part) for told, said in writes for part in (told, token_ids_event(said))]
    stream = b"".join(pieces)
    ends = [len(b"".join(pieces[:i])) for i in range(len(pieces) + 1)]
    places = st.one_of(st.sampled_from(ends), st.integers(0, len(stream)))
    end = data.draw(places, "end")
    cuts = sorted(cut for cut in data.draw(st.lists(places, max_size=8), "cuts") if cut < end)
    reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, end], strict=True)]
    progress = progress_of()

    client, _ = asyncio.run(run(reads, progress))

    # The parser gives an event's bytes before the chunk's last line end has come.
    num_whole = sum(1 for whole in ends[2::2] if whole - len(b"\r\n") <= end)
    assert_told(client, progress, num_whole, writes)


@pytest.mark.parametrize("cut", range(len(sent(WRITES[3])) + 1))
async def test_a_usual_write_is_told_once_and_whole_wherever_a_read_ends(cut: int) -> None:
    stream = b"".join(sent(write) for write in WRITES[:3])
    write, after = sent(WRITES[3]), sent(WRITES[4])
    progress = progress_of()

    client, _ = await run([stream, write[:cut], write[cut:] + after], progress)

    assert_told(client, progress, 5)


@pytest.mark.parametrize("is_clean", [True, False], ids=["ends", "breaks behind its end mark"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_whole_stream_arrives_without_the_ids(size: int, is_clean: bool) -> None:
    stream = b"".join(map(sent, WRITES)) + framed(TAIL) + (b"0\r\n\r\n" if is_clean else b"")
    reads = [stream[i : i + size] for i in range(0, len(stream), size)]

    client, _ = await run(reads, progress_of())

    assert client.seen == told_after(len(WRITES))[0] + TAIL


@pytest.mark.parametrize("num_missing", range(1, len(DONE) + 1))
async def test_a_stream_that_breaks_within_its_end_mark_has_ended_or_not(num_missing: int) -> None:
    stream = b"".join(map(sent, WRITES)) + framed(TAIL).removesuffix(b"\r\n")
    progress = progress_of()

    client, _ = await run([stream[:-num_missing]], progress)

    if num_missing <= len(b"\n\n"):  # only the end of the last line
        assert client.seen == told_after(len(WRITES))[0] + TAIL
    else:
        assert_told(client, progress, len(WRITES))


async def test_the_end_in_the_chunk_of_the_last_ids_is_told() -> None:
    *first, (told, said) = WRITES
    reads = [sent(write) for write in first]
    reads.append(framed(told + token_ids_event(said) + TAIL) + b"0\r\n\r\n")

    client, _ = await run(reads, progress_of())

    assert client.seen == told_after(len(WRITES))[0] + TAIL


async def test_ids_in_the_chunk_of_their_write_are_taken_too() -> None:
    """As whoever stands between may frame it anew."""
    reads = [
        framed(b"".join(told + token_ids_event(said) for told, said in some))
        for some in (WRITES[:1], WRITES[1:3], WRITES[3:])
    ]
    progress = progress_of()

    client, _ = await run(reads, progress)

    assert_told(client, progress, len(WRITES))


async def test_ids_with_fewer_digits_are_taken_too() -> None:
    reads = [framed(b"data: {}\n\n") + framed(b": kvoy-ids 0 7\n\n")] * 3
    progress = progress_of()

    client, _ = await run(reads, progress)

    assert client.seen == 3 * b"data: {}\n\n"
    assert progress.num_told_tokens == 3


async def test_an_engines_own_error_is_not_shown_but_raised() -> None:
    error = b'data: {"error":{"message":"This engine shuts down."}}\n\n'
    progress = progress_of()

    with pytest.raises(EngineErrored, match="shuts down"):
        await run([sent(WRITES[0]), framed(error) + b"0\r\n\r\n"], progress)

    assert progress.prepare_resume(1) is None


async def test_more_than_is_allowed_is_not_remembered_and_still_told() -> None:
    usual: list[Write] = [(chunk(0, b"t"), [ChoiceIds(0, [i])]) for i in range(9)]
    for writes in (WRITES, usual):
        progress = progress_of(max_bytes=20)

        client, _ = await run([sent(write) for write in writes], progress)

        assert client.seen == told_after(len(writes), writes)[0]
        assert progress.num_told_tokens is None
        assert progress.prepare_resume(2) is GaveUp.TOO_LONG
        assert not progress.said


async def test_what_goes_on_after_it_was_lost_is_not_kept() -> None:
    usual: list[Write] = [(chunk(0, b"t"), [ChoiceIds(0, [i])]) for i in range(9)]
    progress = progress_of()
    progress.lose(GaveUp.NO_MEMORY)

    client, _ = await run([sent(write) for write in usual], progress)

    assert progress.said, "the short cut does not look"
    assert progress.settle()
    assert not progress.said
    assert client.seen == told_after(9, usual)[0]


@pytest.mark.parametrize("said", [b"0 1,x", b"0", b"7 1", b"x 1", b";", b"0 000000x"])
async def test_malformed_ids_are_no_ground_to_go_on(said: bytes) -> None:
    progress = progress_of()
    read = framed(b"data: {}\n\n") + framed(b": kvoy-ids " + said + b"\n\n")

    await run([read, read], progress)

    if said == b"0":
        assert progress.prepare_resume(2) is None
    else:
        assert progress.prepare_resume(2) is GaveUp.MALFORMED
