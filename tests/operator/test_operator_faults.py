"""An operator killed at every write of a create, a rollout, an edit back and a delete: the next one
ends where an undisturbed one does, and nothing is missing on the way."""

from __future__ import annotations

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_faults.life import CREATE, EDIT_BACK, ROLL_OUT, Shape
from kvoy_faults.world import live_with_every_death, make_world

pytestmark = pytest.mark.slow

_NUM_AT_ONCE = 12
_PLAIN = Shape("plain", {})
_PREFILL = Shape("prefill", {"engine": {"kind": "sim"}, "prefill": {"replicas": 2}})
_SHARED_ROUTER = Shape("shared router", {}, has_shared_router=True)


@pytest.mark.parametrize("shape", [_PLAIN, _PREFILL, _SHARED_ROUTER], ids=lambda shape: shape.name)
async def test_an_operator_may_die_at_every_write(
    api_server: ApiServer, kvoy_crds: None, shape: Shape
) -> None:
    async with make_world(api_server, has_lws=False) as world:
        calm, lives = await live_with_every_death(world, api_server, shape, _NUM_AT_ONCE)

    for phase in (CREATE, ROLL_OUT, EDIT_BACK):
        num_kills = sum(life.num_kills[phase] for life in lives)
        # How often the status is written in a phase depends on when events come.
        assert num_kills > 1.5 * calm.num_writes[phase], phase
    for life in lives:
        assert life.num_objects == dict.fromkeys(calm.num_objects, 1)
