from hypothesis import given
from hypothesis import strategies as st

from kvoy_engine.stop_strings import StopStrings


def first_end(stops: StopStrings, text: str) -> tuple[int, int] | None:
    """(end, length) of the stop string that ends first; the longest where several end there."""
    state = StopStrings.START
    for index, char in enumerate(text):
        state = stops.advance(state, char)
        if length := stops.num_matched(state):
            return index + 1, length
    return None


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), st.text("abc", max_size=20))
def test_the_first_stop_string_to_end_is_found(strings: list[str], text: str) -> None:
    expected = min(
        (
            (end, -len(string))
            for string in strings
            for end in range(len(string), len(text) + 1)
            if text[:end].endswith(string)
        ),
        default=None,
    )

    found = first_end(StopStrings(strings), text)

    assert found == (None if expected is None else (expected[0], -expected[1]))


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), st.text("abc", max_size=20))
def test_exactly_the_longest_possible_beginning_is_open(strings: list[str], text: str) -> None:
    stops = StopStrings(strings)

    state = StopStrings.START
    for char in text:
        state = stops.advance(state, char)

    beginnings = (len(s[:k]) for s in strings for k in range(len(s) + 1) if text.endswith(s[:k]))
    assert stops.num_open(state) == max(beginnings)


def test_without_strings_there_is_nothing_to_look_for() -> None:
    assert not StopStrings([])
    assert StopStrings(["a"])
