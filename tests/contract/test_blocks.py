"""Golden vectors: engines and routers of neighbouring versions must name the same blocks alike.

A change of any of these is a change of the format, and needs another `person` string.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy_contract.blocks import (
    block_hashes,
    next_hash,
    pack_hashes,
    pack_tokens,
    seed_hash,
    stride_hashes,
    unpack_hashes,
    unpack_tokens,
)

SEEDS = [
    (("m", "", ""), "ff6aaf278d7ae74caba715c5b1d51e46"),
    (("sha256:model", "lora", "tenant"), "679a6d0d2a466849e508c9224b30b860"),
]
PLAIN = ["f38b323a3dfa266c41eca15b081ea3c8", "04939794543bb6513bb22c9bd5c0f66c"]
SALTED = ["b9959f7259590b48fbe75b09fd29f2ad", "ec5bd57d8831f95b5432d11b19710909"]

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)


@pytest.mark.parametrize(("fields", "expected"), SEEDS)
def test_seeds_are_the_golden_ones(fields: tuple[str, str, str], expected: str) -> None:
    assert seed_hash(*fields).hex() == expected


def test_block_hashes_are_the_golden_ones() -> None:
    plain = block_hashes(seed_hash("m"), range(40), 16)
    salted = block_hashes(seed_hash("sha256:model", "lora", "tenant"), [0, 1, 2**32 - 1] * 11, 16)

    assert [h.hex() for h in plain] == PLAIN
    assert [h.hex() for h in salted] == SALTED


@pytest.mark.parametrize(
    ("one", "other"),
    [(("ab", "c", ""), ("a", "bc", "")), (("a", "b", ""), ("a", "", "b")), (("a",), ("b",))],
)
def test_no_two_seeds_are_alike(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert seed_hash(*one) != seed_hash(*other)


@given(tokens, st.integers(1, 20))
def test_only_full_blocks_have_a_hash(token_ids: list[int], block_size: int) -> None:
    assert len(block_hashes(seed_hash("m"), token_ids, block_size)) == len(token_ids) // block_size


@given(tokens, st.integers(0, 100))
def test_a_common_beginning_has_common_hashes(token_ids: list[int], cut: int) -> None:
    whole = block_hashes(seed_hash("m"), token_ids, 16)

    part = block_hashes(seed_hash("m"), token_ids[:cut], 16)

    assert whole[: len(part)] == part


def test_a_hash_stands_for_everything_before_it() -> None:
    one = block_hashes(seed_hash("m"), [1, *range(31)], 16)
    other = block_hashes(seed_hash("m"), [2, *range(31)], 16)

    assert not set(one) & set(other)


@given(tokens)
def test_a_chain_made_block_by_block_is_the_same(token_ids: list[int]) -> None:
    chain = [seed_hash("m")]
    for start in range(0, len(token_ids) - 15, 16):
        chain.append(next_hash(chain[-1], token_ids[start : start + 16]))

    assert chain[1:] == block_hashes(seed_hash("m"), token_ids, 16)


def test_a_stride_is_reported_by_the_block_that_ends_it() -> None:
    hashes = block_hashes(seed_hash("m"), range(16 * 9), 16)

    assert stride_hashes(hashes, 16, 64) == [hashes[3], hashes[7]]
    assert stride_hashes(hashes, 16, 16) == hashes
    assert stride_hashes(hashes[:3], 16, 64) == []


@given(tokens)
def test_packed_tokens_and_hashes_come_back(token_ids: list[int]) -> None:
    hashes = block_hashes(seed_hash("m"), token_ids, 4)

    assert list(unpack_tokens(pack_tokens(token_ids))) == token_ids
    assert unpack_hashes(pack_hashes(hashes)) == hashes


def test_tokens_are_packed_little_endian() -> None:
    assert pack_tokens([1, 2**32 - 1]).hex() == "01000000ffffffff"


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_that_do_not_fit_are_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token_id])


def test_cut_data_is_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        unpack_hashes(b"x" * 17)
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"x" * 5)
