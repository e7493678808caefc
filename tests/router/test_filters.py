"""The one pass over a usual fleet says the same as the filters one after the other."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from kvoy_router import filters
from kvoy_router.endpoint import Role
from kvoy_router.fleet_testing import IDLE, Fleet

STALE_S = 5.0


@given(data=st.data())
def test_all_pass_only_where_no_filter_objects_and_always_for_a_known_fleet_without_objections(
    data: st.DataObject,
) -> None:
    fleet = Fleet(0)
    for number in range(data.draw(st.integers(0, 3), "engines")):
        usual = data.draw(st.booleans(), "usual")
        fleet.info = dataclasses.replace(
            fleet.info,
            role=Role.BOTH if usual else data.draw(st.sampled_from(Role)),
            max_model_len=0 if usual else data.draw(st.sampled_from([0, 149, 150, 200])),
            num_blocks=0 if usual else data.draw(st.sampled_from([0, 9, 10])),
        )
        load = IDLE
        if not usual:
            load = data.draw(
                st.sampled_from(
                    [
                        IDLE,
                        dataclasses.replace(IDLE, ready=False),
                        dataclasses.replace(IDLE, draining=True),
                    ]
                )
            )
        endpoint = fleet.add(f"e{number}", load=load if data.draw(st.integers(0, 9)) else None)
        if not usual:
            fleet.pool.set_draining(endpoint.id, data.draw(st.booleans()))
            endpoint.load_s -= data.draw(st.sampled_from([0.0, 5.0, 5.1]))
            if data.draw(st.booleans()):
                fleet.pool.on_lost(endpoint.id, fleet.now_s)
    exclude = data.draw(st.sampled_from([frozenset[str](), frozenset(["e0"])]), "exclude")
    endpoints = list(fleet.pool.endpoints)
    request = fleet.request((), num_tokens=50)

    passes = filters.all_pass(endpoints, request, exclude, fleet.now_s, STALE_S)

    kept = filters.keep(endpoints, filters.is_serving(exclude), [])
    for check in (
        filters.can_hold_prompt(request),
        filters.can_hold_output(request),
        filters.is_fresh(fleet.now_s, STALE_S),
    ):
        kept = filters.keep(kept, check, [])
    are_known = all(e.load is not None and e.info is not None for e in endpoints)
    assert passes == (bool(endpoints) and are_known and len(kept) == len(endpoints))
