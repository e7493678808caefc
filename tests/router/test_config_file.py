"""The configuration file of a running router: followed, applied at once, refused as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvoy_contract.settings import Settings
from kvoy_contract.testing import FakeEngine, Script
from kvoy_contract.testing_ports import free_port
from kvoy_router.app import Router
from kvoy_router.config import RouterConfig
from kvoy_router.config_file import FIXED, ConfigFile
from kvoy_router.testing import SECRET, eventually, flag_of, is_routable

StartEngine = Callable[..., Awaitable[FakeEngine]]

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}


@contextlib.asynccontextmanager
async def following(
    file: Path, engines: list[FakeEngine], *flags: str
) -> AsyncIterator[tuple[Router, ConfigFile]]:
    """A running router, and the file that it follows; the test says when to look."""
    argv = [flag for engine in engines for flag in ("--engine", flag_of(engine))]
    argv += ["--port", "0", "--secret", SECRET, "--config", str(file), *flags]
    settings = Settings(RouterConfig, "kvoy router", "", argv or ["--engine", "127.0.0.1:9"])
    router = Router(settings.values, settings)
    assert router.config_file is not None
    async with router.serving():
        await eventually(lambda: all(is_routable(router.pool, e.address) for e in engines))
        yield router, router.config_file


def metric(router: Router, name: str, **labels: str) -> float | None:
    return router.metrics.registry.get_sample_value(name, labels)


def reloads(router: Router) -> tuple[float | None, ...]:
    name = "kvoy_router_config_reloads_total"
    return tuple(metric(router, name, outcome=each) for each in ("applied", "refused"))


def _options(router: Router) -> Any:
    return router.proxy.options


LIVE: dict[str, tuple[Any, Callable[[Router], object], object]] = {
    "policy": ("least-load", lambda r: r.pool.policy.name, "least-load"),
    "response_headers": (False, lambda r: r.proxy._attempts.shows_headers, False),
    "max_retries": (7, lambda r: _options(r).failover.max_retries, 7),
    "max_resumes": (7, lambda r: _options(r).failover.max_resumes, 7),
    "max_resume_kib": (7, lambda r: _options(r).max_progress_bytes, 7 * 1024),
    "max_resume_memory_mib": (7, lambda r: r.resume_memory.max_bytes, 7 * 1024 * 1024),
    "hedge": ("fixed", lambda r: r.proxy._hedging.options.mode, "fixed"),
    "hedge_after_s": (7.5, lambda r: r.proxy._hedging.options.after_s, 7.5),
    "hang_timeout_s": (7.5, lambda r: r._health._hangs.silence_s, 7.5),
    "retry_share": (0.75, lambda r: [b.share for b in r._budgets], [0.75, 0.75]),
    "retry_burst": (7, lambda r: [b.burst for b in r._budgets], [7, 7]),
    "breaker_failures": (7, lambda r: r.breakers.limits.max_failures, 7),
    "breaker_pause_s": (7.5, lambda r: r.breakers.limits.first_pause_s, 7.5),
    "max_engine_wait_s": (7.5, lambda r: r.gate.flow.limits.max_engine_wait_s, 7.5),
    "shared_wait": (0.75, lambda r: r.gate.flow.limits.shared_wait, 0.75),
    "max_waiting": (7, lambda r: r.gate.flow.limits.max_waiting, 7),
    "max_waiting_per_tenant": (7, lambda r: r.gate.flow.limits.max_waiting_per_tenant, 7),
    "max_waiting_per_priority": (7, lambda r: r.gate.flow.limits.max_waiting_per_priority, 7),
    "max_waiting_s": (7.5, lambda r: r.gate.flow.limits.max_waiting_s, 7.5),
    "age_s": (7.5, lambda r: r.gate.flow.limits.age_s, 7.5),
    "aged_share": (0.75, lambda r: r.gate.flow.limits.aged_share, 0.75),
    "max_held": (7, lambda r: r.gate.flow.limits.max_held, 7),
    "max_held_s": (7.5, lambda r: r.gate.flow.limits.max_held_s, 7.5),
    "objective": (["batch=5"], lambda r: r.entrance._access.objectives, {"batch": 5}),
    "request_timeout_s": (7.5, lambda r: _options(r).request_timeout_s, 7.5),
    "connect_timeout_s": (7.5, lambda r: r.clients.limits.connect_s, 7.5),
    "first_byte_timeout_s": (7.5, lambda r: r.clients.limits.first_byte_s, 7.5),
    "whole_answer_timeout_s": (7.5, lambda r: r.clients.limits.whole_answer_s, 7.5),
    "idle_timeout_s": (7.5, lambda r: r.clients.limits.idle_s, 7.5),
    "engine_keep_alive_s": (7.5, lambda r: r.clients.limits.keep_alive_s, 7.5),
    "max_body_mib": (7, lambda r: r.server.limits.max_body_bytes, 7 * 1024 * 1024),
    "max_buffered_mib": (7, lambda r: r.memory.balance.told_bytes, 7 * 1024 * 1024),
    "max_connections": (7, lambda r: r.server.limits.max_connections, 7),
    "header_timeout_s": (7.5, lambda r: r.server.limits.head_s, 7.5),
    "body_timeout_s": (7.5, lambda r: r.server.limits.body_s, 7.5),
    "keep_alive_s": (7.5, lambda r: r.server.limits.keep_alive_s, 7.5),
    "drain_timeout_s": (7.5, lambda r: r.config.drain_timeout_s, 7.5),
    "log_level": ("error", lambda r: r.config.log_level, "error"),
}
"""Setting: a new value, where the running router has it, and as what."""


def test_every_setting_either_changes_while_the_router_runs_or_is_refused() -> None:
    assert LIVE.keys() | FIXED == {field.name for field in fields(RouterConfig)}
    assert not LIVE.keys() & FIXED


async def test_every_live_setting_reaches_the_part_that_it_is_about(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("{}")

    async with following(file, [], "--engine", "127.0.0.1:9") as (router, config_file):
        config_file.check()
        for name, (value, read, expected) in LIVE.items():
            assert read(router) != expected, name
            file.write_text(f"{name.replace('_', '-')}: {value}\n")
            config_file.check()
            assert config_file.error is None
            assert read(router) == expected, name

        assert reloads(router) == (len(LIVE), 0)
        assert router.config.policy == "kv-aware", (
            "what is not in the file any more has its default"
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("host: 0.0.0.0", "host: cannot change while the router runs"),
        ("keys-file: /other", "keys-file: needs --admin-port"),
        ("tls-key: /k", "tls-certificate, tls-key: give both or none"),
        ("max-retrys: 3", "max-retrys: unknown key; max-retries is one"),
        ("max-retries: many", "max-retries: must be a whole number, not 'many'"),
        ("max-retries: -1", "max-retries: must be at least 0, not -1"),
        ("retry-share: 1.5", "retry-share: must be from 0 to 1, not 1.5"),
        ("policy: best", "--policy: invalid choice: 'best'"),
        ("hedge: maybe", "(choose from 'off', 'observed', 'fixed')"),
        ("shared-wait: 2", "shared-wait: must be at most 1, not 2"),
        ("max-retries: 3\nport: [", "not YAML: line 2"),
        ("", "the file is empty"),
    ],
)
async def test_a_bad_file_changes_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, words: str
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("max-retries: 5")

    async with following(file, [], "--engine", "127.0.0.1:9") as (router, config_file):
        config_file.check()
        before, good_s = router.config, metric(router, GOOD_S)
        file.write_text(text)
        config_file.check()
        config_file.check()

        (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
        assert record.getMessage() == ConfigFile.unusable
        assert words in str(record.__dict__["error"])
        assert router.config is before
        assert reloads(router) == (0, 1)
        assert metric(router, "kvoy_router_config_ok") == 0
        assert metric(router, GOOD_S) == good_s

        file.write_text("max-retries: 6")
        config_file.check()
        assert router.config.max_retries == 6
        assert reloads(router) == (1, 1)
        assert metric(router, "kvoy_router_config_ok") == 1


GOOD_S = "kvoy_router_config_last_reload_success_timestamp_seconds"


async def test_arguments_and_environment_stand_over_every_text_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("{}")
    monkeypatch.setenv("KVOY_MAX_RETRIES", "4")

    async with following(file, [], "--engine", "127.0.0.1:9", "--max-resumes", "3") as (
        router,
        config_file,
    ):
        file.write_text("max-retries: 9\nmax-resumes: 9\nport: 9\nmax-waiting: 9")
        config_file.check()

        config = router.config
        assert (config.max_retries, config.max_resumes, config.port) == (4, 3, 0)
        assert config.max_waiting == 9


async def test_a_mounted_file_is_followed_through_its_links(tmp_path: Path) -> None:
    def mount(text: str) -> None:
        data = tmp_path / f"..{len(list(tmp_path.iterdir()))}"
        data.mkdir()
        (data / "router.yaml").write_text(text)
        (tmp_path / "..tmp").symlink_to(data.name)
        os.replace(tmp_path / "..tmp", tmp_path / "..data")

    mount("policy: random")
    (tmp_path / "router.yaml").symlink_to("..data/router.yaml")

    async with following(tmp_path / "router.yaml", [], "--engine", "127.0.0.1:9") as (router, _):
        assert router.pool.policy.name == "random"
        mount("policy: round-robin")
        await eventually(lambda: router.pool.policy.name == "round-robin")


async def test_reloads_drop_no_request(start_engine: StartEngine, tmp_path: Path) -> None:
    engines, gate = [await start_engine() for _ in range(2)], asyncio.Event()
    for engine in engines:
        engine.script = Script(gate=gate, pieces=("x",) * 10, gap_s=0.01)
    file = tmp_path / "router.yaml"
    file.write_text("{}")
    texts = (
        "policy: round-robin\nmax-waiting: 0\nmax-held: 0\nresponse-headers: false",
        "policy: least-load\nmax-body-mib: 1\nmax-retries: 0\nmax-resumes: 0\nmax-connections: 1",
        "policy: kv-aware\nrequest-timeout-s: 0.01\nidle-timeout-s: 0.001\nretry-burst: 0",
        "policy: random\nmax-engine-wait-s: 0.1\nbreaker-failures: 0\nnonsense: 1",
    )

    async with following(file, engines) as (router, config_file):
        url = f"http://127.0.0.1:{router.server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            asking = [
                asyncio.create_task(client.post("/v1/chat/completions", json=STREAM))
                for _ in range(40)
            ]
            await eventually(lambda: sum(engine.in_flight for engine in engines) == 40)
            for text in texts:
                file.write_text(text)
                config_file.check()
            gate.set()
            answers = await asyncio.gather(*asking)

        assert [answer.status_code for answer in answers] == [200] * 40
        assert all(a.text.endswith("data: [DONE]\n\n") for a in answers)
        assert reloads(router) == (3, 1)
        router.gate.flow.check_integrity()


async def test_who_waits_keeps_its_place_beyond_a_smaller_bound(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = await start_engine()
    file = tmp_path / "router.yaml"
    file.write_text("max-waiting: 20")

    async with following(file, [engine]) as (router, config_file):
        engine.report_load(running=1, queued_prefill_tokens=10_000_000)
        (endpoint,) = router.pool.endpoints
        await eventually(lambda: endpoint.load and endpoint.load.queued_prefill_tokens)
        url = f"http://127.0.0.1:{router.server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            asking = [
                asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
                for _ in range(5)
            ]
            await eventually(lambda: router.gate.flow.num_waiting == 5)
            file.write_text("max-waiting: 2")
            config_file.check()
            refused = await client.post("/v1/chat/completions", json=CHAT)
            router.gate.flow.check_integrity()
            engine.report_load(running=0, queued_prefill_tokens=0)
            answers = await asyncio.gather(*asking)

    assert refused.status_code == 429
    assert [answer.status_code for answer in answers] == [200] * 5


@pytest.mark.slow
async def test_a_router_process_follows_its_file_and_does_not_start_with_a_bad_one(
    tmp_path: Path,
) -> None:
    file, port = tmp_path / "router.yaml", free_port()
    argv = (sys.executable, "-m", "kvoy_router", "--engine", "127.0.0.1:9", "--port", str(port))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVOY_")}

    async def start(text: str) -> asyncio.subprocess.Process:
        file.write_text(text)
        return await asyncio.create_subprocess_exec(
            *(*argv, "--config", str(file)), env=environ, stderr=asyncio.subprocess.PIPE
        )

    bad = await start("max-retrys: 1")
    _, errors = await bad.communicate()
    assert bad.returncode == 2
    (line,) = errors.decode().splitlines()
    assert "max-retrys: unknown key; max-retries is one" in line

    router = await start("log-level: info")
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

            async def until_it_counts(series: str) -> None:
                async with asyncio.timeout(60):
                    while True:
                        with contextlib.suppress(httpx.TransportError):
                            if series in (await client.get("/metrics")).text:
                                return
                        await asyncio.sleep(0.05)

            await until_it_counts('config_reloads_total{outcome="applied"} 0.0')
            await client.post("/v1/completions", json={"model": "first", "prompt": "x"})
            file.write_text("log-level: warning\nmax-connections: 100")
            await until_it_counts('config_reloads_total{outcome="applied"} 1.0')
            await client.post("/v1/completions", json={"model": "second", "prompt": "x"})
    finally:
        router.terminate()
        _, errors = await router.communicate()

    assert router.returncode == 0
    lines = [line.split(" ", 3)[3] for line in errors.decode().splitlines()]
    assert sum(line.startswith("request ") for line in lines) == 1, "the second one is not logged"
