"""What the processes of a group say to each other: one JSON value a line, over one connection.

Rank 0 begins with a challenge; the other answers with what it is and a proof that it knows the
group's secret, and gets rank 0's own proof back. From then on both send a beat each second: silence
is a loss. Both ends use this module.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import json
from importlib.metadata import version
from typing import Final

import msgspec

from kvoy_engine.config import EngineConfig
from kvoy_engine.group import Settings

BEAT_S: Final = 1.0
SILENCE_S: Final = 10.0
MAX_LINE_BYTES: Final = 64 * 1024
_OWN_SETTINGS: Final = frozenset(
    {
        *("host", "port", "telemetry_port", "secret", "num_threads", "download_dir"),
        *("node_rank", "master_addr", "master_port", "group_timeout_s"),
        *("log_level", "log_format"),
    }
)
"""What each process of a group may have as it likes."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: str


class Join(msgspec.Struct, frozen=True, tag="join"):
    rank: int
    nonce: str
    settings: dict[str, str]
    proof: str


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    proof: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str
    is_final: bool


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Alive."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """This rank was told to end: let the group finish its requests and end."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Rank 0 ends, its requests done."""


Message = Challenge | Join | Joined | Refused | Beat | Leaving | End
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Unreadable(Exception):
    """What came is no message of this protocol, or the connection has ended."""


async def read(reader: asyncio.StreamReader) -> Message:
    """Raises Unreadable; TimeoutError when nothing came for `SILENCE_S`."""
    async with asyncio.timeout(SILENCE_S):
        try:
            line = await reader.readuntil(b"\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            raise Unreadable("the connection has ended") from None
        except asyncio.LimitOverrunError:
            raise Unreadable("a line is too long") from None
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise Unreadable(f"no message of a group: {error}") from None


def write(writer: asyncio.StreamWriter, message: Message) -> None:
    """Has no effect once the connection is closing."""
    if not writer.is_closing():
        writer.write(msgspec.json.encode(message) + b"\n")


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """What all processes of a group must have in common."""
    settings = {
        f"--{field.name.replace('_', '-')}": str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in _OWN_SETTINGS
    }
    return settings | {"the version": version("kvoy")}


def proof(secret: str | None, who: str, challenge: str, nonce: str, settings: Settings) -> str:
    """That `who` knows the secret, has these settings, and says so in this very connection."""
    said = json.dumps([who, challenge, nonce, dict(sorted(settings.items()))])
    return hmac.new((secret or "").encode(), said.encode(), hashlib.sha256).hexdigest()


def is_proof(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
