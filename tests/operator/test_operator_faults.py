"""An operator killed at every write of a create, a rollout, an edit back and a delete: the next one
ends where an undisturbed one does, and nothing is missing on the way.

Each write is tried before or after the server has carried it out, in turn; with KVOY_FAULTS=all
both ways, which takes twice as long. Of groups, whose pods take longest, it is every third write,
with KVOY_FAULTS=all every one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.control_plane import ControlPlane
from kvoy_cluster.fixtures import apply_kvoy_crds
from kvoy_faults.life import CREATE, EDIT_BACK, ROLL_OUT, Shape, Told
from kvoy_faults.world import live_with_every_death, make_world

_NUM_AT_ONCE = 6
_ON_BOTH_SIDES = os.environ.get("KVOY_FAULTS") == "all"
_HOUR_S = 3600

pytestmark = [pytest.mark.slow, *([pytest.mark.timeout(_HOUR_S)] if _ON_BOTH_SIDES else [])]

_SIM = {"engine": {"kind": "sim"}}
_PLAIN = Shape("plain", {})
_PREFILL = Shape("prefill", {**_SIM, "prefill": {"replicas": 2}})
_SHARED_ROUTER = Shape("shared router", {}, has_shared_router=True)
_GROUPS = Shape("groups", {**_SIM, "nodes": 2})
_NODE = {"cpu": "4000", "memory": "16000Gi", "pods": "9000"}


_EVERY_OF_GROUPS = 1 if _ON_BOTH_SIDES else 3


def _check(calm: Told, lives: list[Told], every: int = 1) -> None:
    for phase in (CREATE, ROLL_OUT, EDIT_BACK):
        num_kills = sum(life.num_kills[phase] for life in lives)
        # How often the status is written in a phase depends on when events come.
        assert num_kills >= 0.75 * calm.num_writes[phase] * (1 + _ON_BOTH_SIDES) // every, phase
    for life in lives:
        assert life.num_objects == dict.fromkeys(calm.num_objects, 1)


@pytest.mark.parametrize("shape", [_PLAIN, _PREFILL, _SHARED_ROUTER], ids=lambda shape: shape.name)
async def test_an_operator_may_die_at_every_write(
    api_server: ApiServer, kvoy_crds: None, shape: Shape
) -> None:
    async with make_world(api_server, has_lws=False) as world:
        calm, lives = await live_with_every_death(
            world, api_server, shape, _NUM_AT_ONCE, on_both_sides=_ON_BOTH_SIDES
        )

    _check(calm, lives)


@pytest.fixture
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    apply_kvoy_crds(control_plane)
    control_plane.add_fake_node("large", _NODE)
    yield control_plane
    control_plane.remove_fake_node("large")


async def test_an_operator_of_groups_may_die_at_every_write(plane: ControlPlane) -> None:
    async with make_world(plane, has_lws=True) as world:
        calm, lives = await live_with_every_death(
            world,
            plane,
            _GROUPS,
            _NUM_AT_ONCE,
            on_both_sides=_ON_BOTH_SIDES,
            every=_EVERY_OF_GROUPS,
        )

    _check(calm, lives, _EVERY_OF_GROUPS)
