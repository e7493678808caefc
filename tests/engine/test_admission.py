"""Which numbered requests the load reports include."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoy_engine.admission import MAX_BEYOND, AdmissionLedger, Admitted


def test_numbers_out_of_order_wait_for_the_gap_to_close() -> None:
    admitted = Admitted()

    for number in (1, 3, 4):
        admitted.admit(number)
    through, beyond = admitted.through, set(admitted.beyond)
    admitted.admit(2)

    assert (through, beyond) == (1, {3, 4})
    assert (admitted.through, admitted.beyond) == (4, set())


def test_a_settled_number_is_not_waited_for() -> None:
    admitted = Admitted()
    admitted.admit(1)
    admitted.admit(4)

    admitted.settle_through(3)

    assert (admitted.through, admitted.beyond) == (4, set())


@given(st.permutations(range(1, 30)), st.integers(0, 29))
def test_any_order_ends_with_every_number_settled(order: list[int], settled: int) -> None:
    admitted = Admitted()

    for index, number in enumerate(order):
        admitted.admit(number)
        if index == len(order) // 2:
            admitted.settle_through(settled)

    assert (admitted.through, admitted.beyond) == (29, set())


def test_a_number_that_never_comes_does_not_grow_the_memory() -> None:
    admitted = Admitted()

    for number in range(2, 3 * MAX_BEYOND):
        admitted.admit(number)

    assert len(admitted.beyond) <= MAX_BEYOND
    assert admitted.through == 3 * MAX_BEYOND - 1


def test_the_longest_silent_router_is_forgotten_first() -> None:
    ledger = AdmissionLedger(max_routers=2)
    ledger.admit("a", 1)
    ledger.admit("b", 1)
    ledger.admit("a", 2)

    ledger.admit("c", 1)

    assert len(ledger) == 2
    assert ledger.of("a").through == 2
    assert ledger.of("b").through == 0


def test_requests_without_a_router_are_not_counted() -> None:
    ledger = AdmissionLedger()

    ledger.admit("", 0)

    assert len(ledger) == 0
