"""Engines from flags and from a watched file."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from kvoy_contract.testing import FakeEngine
from kvoy_router.config import EngineAddress, RouterConfig
from kvoy_router.discovery import Discovery, parse_engines
from kvoy_router.testing import eventually, flag_of, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]


@pytest.mark.parametrize(
    ("text", "http", "telemetry"),
    [
        ("h:8100", "h:8100", "h:9100"),
        ("h:8100@7000", "h:8100", "h:7000"),
        ("http://h:8100/", "h:8100", "h:9100"),
        ("[::1]:8100", "[::1]:8100", "[::1]:9100"),
    ],
)
def test_an_address_is_read(text: str, http: str, telemetry: str) -> None:
    assert EngineAddress.parse(text) == EngineAddress(http, telemetry)


@pytest.mark.parametrize("text", ["h", ":1", "h:", "h:x", "h:0", "h:70000", "h:1@", "::1:80"])
def test_a_bad_address_names_itself(text: str) -> None:
    with pytest.raises(ValueError, match="not"):
        EngineAddress.parse(text)
    with pytest.raises(ValueError, match=r"^engine: "):
        RouterConfig(engine=(text,))


def test_a_secret_that_no_header_can_carry_names_itself() -> None:
    with pytest.raises(ValueError, match=r"^secret: "):
        RouterConfig(engine=("h:1",), secret="s\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines: [", "not YAML"),
        ("- a", "engines"),
        ("engines: {a: 1}", "list"),
        ("engines: [{adress: 'h:1'}]", r"engines\[0\]"),
        ("engines: ['h:1', 'h:x']", r"engines\[1\]"),
        ("engines: ['h:1', {address: 'h:1'}]", "twice"),
    ],
)
def test_a_bad_file_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_engines(text)


def write(path: Path, text: str) -> None:
    """Replace the file as editors and Kubernetes do: at once, as another inode."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def test_a_file_that_breaks_keeps_the_engines_that_were_known(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    seen: list[Sequence[EngineAddress]] = []
    discovery = Discovery((), file, seen.append)

    discovery.check()
    assert seen == [()]
    write(file, "engines: [{address: 'h:1', telemetry: 'h:2'}]")
    discovery.check()
    write(file, "engines: [oops")
    discovery.check()
    assert discovery.error is not None
    discovery.check()
    file.unlink()
    discovery.check()
    write(file, "engines: []")
    discovery.check()

    assert seen == [(), [EngineAddress("h:1", "h:2")], []]
    assert discovery.error is None


async def test_engines_come_and_go_with_the_file(start_engine: StartEngine, tmp_path: Path) -> None:
    one, other = await start_engine(), await start_engine()
    file = tmp_path / "engines.yaml"
    write(file, f"engines: ['{flag_of(one)}']")

    async with running_router([one], engine=(), engines_file=str(file)) as router:
        router.sources.listed._poll_s = 0.02
        write(file, f"engines: ['{flag_of(other)}']")
        await eventually(lambda: other.num_acks == 1)
        await eventually(lambda: not one.router_ids)

        assert [endpoint.address for endpoint in router.pool.endpoints] == [other.address]
        assert one.address.encode() not in router.metrics.expose()
        assert other.address.encode() in router.metrics.expose()
