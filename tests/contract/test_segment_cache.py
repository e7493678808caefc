from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvoy_contract.segment_cache import SegmentCache


def ids(count: int) -> "array[int]":
    return array("I", range(count))


def test_a_text_has_the_ids_that_were_put() -> None:
    cache = SegmentCache()

    cache.put("a", ids(3))

    assert cache.get("a") == ids(3)
    assert cache.get("b") is None
    assert (cache.num_hits, cache.num_misses) == (1, 1)


def test_the_least_recently_used_goes_first() -> None:
    cache = SegmentCache(max_bytes=10 * 256)
    for text in "abcdefgh":
        cache.put(text, ids(1))

    assert cache.get("a") is not None
    for text in "ij":
        cache.put(text, ids(1))

    assert cache.get("a") is not None
    assert cache.get("b") is None


def test_one_text_cannot_push_out_all_others() -> None:
    cache = SegmentCache(max_bytes=8000)
    cache.put("a", ids(1))

    cache.put("b" * 10_000, ids(1000))

    assert cache.get("a") is not None
    assert len(cache) == 1


@given(st.lists(st.tuples(st.text("abc", max_size=3), st.integers(0, 200))))
def test_the_bound_holds_whatever_is_put(entries: list[tuple[str, int]]) -> None:
    cache = SegmentCache(max_bytes=5000)

    for text, count in entries:
        cache.put(text, ids(count))
        assert 0 <= cache.num_bytes <= 5000

    assert (cache.num_bytes > 0) == (len(cache) > 0)
