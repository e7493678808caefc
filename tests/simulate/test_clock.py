"""The order in which virtual time lets things happen."""

from __future__ import annotations

from kvoy_simulate.clock import VirtualClock


def test_actions_happen_in_order_of_time_and_then_of_being_asked_for() -> None:
    clock = VirtualClock(-1.0)
    seen: list[tuple[str, float]] = []

    def see(name: str) -> None:
        seen.append((name, clock.now_s))

    clock.at(2.0, see, "late")
    clock.at(1.0, see, "first")
    clock.at(1.0, see, "second")
    clock.after(0.5, see, "soon")
    clock.run(1.5)

    assert seen == [("soon", -0.5), ("first", 1.0), ("second", 1.0)]
    assert clock.now_s == 1.5
    clock.run(3.0)
    assert seen[-1] == ("late", 2.0)


def test_what_is_asked_for_the_past_happens_now() -> None:
    clock = VirtualClock(5.0)
    seen: list[float] = []

    clock.at(1.0, lambda: seen.append(clock.now_s))
    clock.run(5.0)

    assert seen == [5.0]


def test_a_run_ends_when_it_is_over_and_leaves_the_rest() -> None:
    clock = VirtualClock()
    seen: list[int] = []
    for i in range(5):
        clock.at(float(i), seen.append, i)

    clock.run(10.0, lambda: len(seen) == 3)

    assert seen == [0, 1, 2]
    assert clock.now_s == 2.0
