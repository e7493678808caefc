"""What an operator tells a router about the services behind it: one small YAML document.

The router learns which engines there are from the cluster, and everything else from their
telemetry; this says whose engines may be trusted, by which secret, and how traffic is split between
services that serve one model name. A field that is not known here is ignored: an operator and a
router of neighbouring versions work together.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvoy_contract.envelope import check_secret

MAX_WEIGHT = 1000
DEFAULT_WEIGHT = 100

_Weight = Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHT)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class FleetService(msgspec.Struct, frozen=True, kw_only=True):
    """One service; its engines' pods descend from the object with this `uid`."""

    name: _Text
    uid: _Text
    model: _Text
    """The model's name in requests."""
    secret: _Text
    """What the service's engines ask of a router."""
    weight: _Weight = DEFAULT_WEIGHT
    """Share of the model's traffic against other services of the same model; 0: none while another
    can serve."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    services: tuple[FleetService, ...]


def parse_fleet(text: str) -> Fleet:
    """Raises ValueError that names the wrong field."""
    try:
        fleet = msgspec.yaml.decode(text, type=Fleet)
    except msgspec.MsgspecError as error:
        raise ValueError(f"fleet: {error}") from None
    for field in ("name", "uid"):
        values = [getattr(service, field) for service in fleet.services]
        if len(set(values)) < len(values):
            raise ValueError(f"fleet: services: the same {field} twice")
    for service in fleet.services:
        try:
            check_secret(service.secret)
        except ValueError as error:
            raise ValueError(f"fleet: services: {service.name}: {error}") from None
    return fleet


def render_fleet(fleet: Fleet) -> str:
    """The document that `parse_fleet` reads; equal fleets give equal text."""
    return msgspec.yaml.encode(fleet).decode()
