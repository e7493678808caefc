import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy_contract.errors import EngineFailed, UpstreamFailed
from kvoy_contract.sse import (
    DONE,
    ChoiceIds,
    SseEvent,
    SseParser,
    data_event,
    error_event,
    parse_token_ids_comment,
    token_ids_event,
)

LINES = st.sampled_from(
    [b"", b"", b"data: x", b"data:y", b"data", b": note", b":", b"event: z", b"data:  two", b"junk"]
)
LINE_ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


def parse(pieces: list[bytes]) -> list[SseEvent]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def meaning(events: list[SseEvent]) -> list[tuple[bytes | None, tuple[bytes, ...]]]:
    return [(event.data, event.comments) for event in events]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    lines = draw(st.lists(st.tuples(LINES, LINE_ENDS), max_size=20))
    return b"".join(line + end for line, end in lines)


@given(streams(), st.data())
def test_any_split_of_the_bytes_gives_the_same_events(stream: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    pieces = [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)])]

    events = parse(pieces)

    assert meaning(events) == meaning(parse([stream]))
    assert meaning(events) == meaning(parse([stream[i : i + 1] for i in range(len(stream))]))


@given(streams())
def test_an_event_can_be_forwarded_by_its_raw_bytes_alone(stream: bytes) -> None:
    events = parse([stream])

    forwarded = [event.raw for event in events]

    assert meaning(parse(forwarded)) == meaning(events)
    assert all(raw in stream for raw in forwarded)


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"], ids=["LF", "CR", "CRLF"])
def test_every_line_end_is_understood(end: bytes) -> None:
    stream = end.join([b": hello", b"data: a", b"data: b", b"", b"data: c", b"", b""])

    assert meaning(parse([stream])) == [(b"a\nb", (b": hello",)), (b"c", ())]


def test_what_is_encoded_is_parsed_back() -> None:
    error = EngineFailed("The engine broke.")
    stream = data_event(b'{"a":1}') + error_event(error) + DONE

    events = parse([stream])

    assert [event.data for event in events] == [b'{"a":1}', error.to_json(), b"[DONE]"]
    assert [event.is_done for event in events] == [False, False, True]


CHOICE_IDS = st.builds(
    ChoiceIds, st.integers(0, 127), st.lists(st.integers(0, 2**31 - 1)), st.booleans()
)


@given(st.lists(CHOICE_IDS, min_size=1))
def test_token_ids_travel_in_an_event_of_their_own(said: list[ChoiceIds]) -> None:
    chunk, ids = parse([data_event(b"{}") + token_ids_event(said)])

    assert chunk.comments == ()
    assert ids.data is None
    (comment,) = ids.comments
    assert parse_token_ids_comment(comment) == said
    assert parse_token_ids_comment(b": ping") is None


def test_a_malformed_token_ids_comment_is_an_error() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_token_ids_comment(b": kvoy-ids 0 1,x")


def test_a_byte_order_mark_is_passed_over_once() -> None:
    assert meaning(parse([b"\xef\xbb\xbfdata: x\n\n"])) == [(b"x", ())]


def test_an_event_without_an_end_is_bounded() -> None:
    parser = SseParser(max_event_bytes=1000)

    parser.feed(b"data: " + b"x" * 900)
    with pytest.raises(UpstreamFailed, match="1000 bytes"):
        parser.feed(b"x" * 100)


def test_many_small_events_in_one_piece_are_no_large_event() -> None:
    parser = SseParser(max_event_bytes=1000)

    assert len(parser.feed(data_event(b"x") * 1000)) == 1000


def test_a_stream_cut_in_an_event_is_noticed() -> None:
    parser = SseParser()

    parser.feed(b"data: x\n\n")
    assert not parser.has_partial_event
    parser.feed(b"data: y\n")
    assert parser.has_partial_event
