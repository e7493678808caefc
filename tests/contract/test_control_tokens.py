import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy_contract.codec import AddedToken
from kvoy_contract.control_tokens import ControlTokens, Segment, unused_sentinels

MARK = "\ue000"
NAMES = st.lists(st.text("ab<", min_size=2, max_size=4), min_size=1, max_size=5, unique=True)


def controls(*contents: str, template: str = "") -> ControlTokens:
    tokens = [AddedToken(i, content, is_special=True) for i, content in enumerate(contents)]
    return ControlTokens(tokens, template)


@given(NAMES, st.text("ab<", max_size=12))
def test_no_token_is_whole_in_shielded_text(names: list[str], text: str) -> None:
    shielded = controls(*names).shield(text, MARK, forgeable=True)

    assert not any(name in shielded for name in names)
    assert shielded.replace(MARK, "") == text


@given(NAMES, st.text("ab<", max_size=6), st.text("ab<", max_size=6))
def test_no_token_forms_between_two_texts(names: list[str], one: str, other: str) -> None:
    tokens = controls(*names)

    joined = "".join(tokens.shield(text, MARK, forgeable=True) for text in (one, other))

    assert not tokens.occur_in(joined)


@given(NAMES, st.text("ab< ", max_size=12))
def test_a_rendered_text_is_split_at_the_longest_tokens(names: list[str], text: str) -> None:
    longest_first = sorted(names, key=len, reverse=True)
    expected = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)

    segments = controls(*names).split(text)

    assert [segment.text for segment in segments] == [piece for piece in expected if piece]
    assert all((s.control_id is not None) == (s.text in names) for s in segments)


def test_a_token_may_take_the_space_beside_it() -> None:
    tokens = ControlTokens(
        [
            AddedToken(1, "<l>", is_special=True, takes_left_space=True),
            AddedToken(2, "<r>", is_special=True, takes_right_space=True),
        ],
        "",
    )

    assert tokens.split("a \n<l> b <r>\u3000\nc") == [
        Segment("a"),
        Segment("<l>", 1, 6),
        Segment(" b "),
        Segment("<r>", 2, 12),
        Segment("c"),
    ]


def test_tokens_that_are_not_special_count_where_the_template_writes_them() -> None:
    added = [
        AddedToken(1, "<think>", is_special=False),
        AddedToken(2, "<table>", is_special=False),
        AddedToken(3, "\n\n", is_special=False),
    ]

    tokens = ControlTokens(added, "{{ x }}\n\n<think>")

    assert tokens.ids == {1}
    assert tokens.shield("<think>", MARK, forgeable=False) == "<think>"
    assert tokens.shield("<think>", MARK, forgeable=True) == f"<{MARK}think>"


def test_sentinels_are_characters_that_nobody_uses() -> None:
    assert unused_sentinels(["a\ue000b", "\ue002"], 2) == ["\ue001", "\ue003"]
    with pytest.raises(ValueError, match="private-use"):
        unused_sentinels(["".join(map(chr, range(0xE000, 0xF900)))], 1)
