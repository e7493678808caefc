"""`kvoy router key new`: makes an API key, and says what to put into the keys file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from kvoy_router.keys import Key, new_key


def main(argv: Sequence[str]) -> int:
    """The key goes to standard output and nowhere else; the entry to standard error, so that
    `KEY=$(kvoy router key new --tenant T)` shows it."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    key, key_id, digest = new_key()
    entry = {
        "id": key_id,
        "hash": digest,
        "tenant": arguments.tenant,
        "priority": arguments.priority or None,
        "requests-per-minute": arguments.requests_per_minute,
        "tokens-per-minute": arguments.tokens_per_minute,
        "models": arguments.model or None,
        "expires": arguments.expires_in_days and _in_days(arguments.expires_in_days),
    }
    entry = {name: value for name, value in entry.items() if value is not None}
    try:
        msgspec.convert(entry, Key)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    print(
        f"# Shown this once; keep it secret. An entry for the keys file (under `keys:`):\n"
        f"{msgspec.yaml.encode([entry]).decode()}",
        file=sys.stderr,
    )
    print(key)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvoy router key", description="API keys of a router (see --keys-file)."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser(
        "new", help="make a key: prints it once, and its entry for the keys file"
    )
    new.add_argument("--tenant", required=True, help="whose key it is")
    new.add_argument(
        "--priority", type=int, default=0, help="of its requests, lower first (default: 0)"
    )
    new.add_argument("--requests-per-minute", type=int, metavar="N", help="at each replica")
    new.add_argument(
        "--tokens-per-minute", type=int, metavar="N", help="prompt and answer, at each replica"
    )
    new.add_argument(
        "--model", action="append", metavar="NAME", help="that it may use; repeatable; all if none"
    )
    new.add_argument("--expires-in-days", type=int, metavar="N", help="never unless told")
    return parser


def _in_days(days: int) -> str:
    return (datetime.now(UTC) + timedelta(days=days)).isoformat(timespec="seconds")
