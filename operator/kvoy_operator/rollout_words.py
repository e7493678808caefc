"""What the status says about a rollout, for people. Pure."""

from __future__ import annotations

from kvoy_operator.rollout_situation import Situation
from kvoy_operator.rollout_values import Phase


def message_of(here: Situation, phase: Phase) -> str:
    """The message of the condition `Progressing`."""
    wanted = here.given.wanted
    ready = ", ".join(
        f"{pool.name} {pool.new.num_serving} of {pool.desired}"
        for pool in here.pools
        if pool.is_wanted
    )
    match phase:
        case Phase.SETTLED:
            return f"Revision {wanted} is complete: {ready} ready."
        case Phase.WAITING_FOR_MODEL:
            return f"Revision {wanted} waits until its model is in the cache."
        case Phase.STOPPED:
            return f"Revision {wanted} makes no progress ({ready} ready){_stopped_by(here)}"
        case Phase.ROLLING_OUT if here.health.has_no_room:
            return (
                f"Revision {wanted} ({ready} ready) finds no room for one engine more, and the "
                f"rollout may not do with one less: add room, or change rollout.strategy or "
                f"rollout.maxUnavailable."
            )
        case Phase.REPLACING:
            return f"Revision {wanted} replaces engines in their place: {ready} ready."
        case _:
            return f"Revision {wanted}: {ready} ready."


def outage_message(wanted: str, dark: tuple[str, ...]) -> str:
    """Of `OutageAhead`; `dark` are the pools that will be without engines."""
    pools = " and ".join(dark)
    return (
        f"Revision {wanted} can only replace what serves now: {pools} will have no ready engine "
        f"until the new one has loaded."
    )


def _stopped_by(here: Situation) -> str:
    shown = f" because of {here.health.stuck_subject}" if here.health.stuck_subject else ""
    if not here.keeper:
        return f"{shown}."
    return f"{shown}; revision {here.keeper} goes on serving. Edit the spec to try again."
