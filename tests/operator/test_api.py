"""Calls to an API server that is played by a few lines: who calls, and what comes of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import Cluster, Context, User

from kvoy_operator.api import Api
from kvoy_operator.api_errors import ApiRefusal, ApiUnreachable


def _config(server: str, token_file: Path) -> SingleConfig:
    config = KubeConfig(
        clusters={"c": Cluster(server=server)},
        contexts={"x": Context(cluster="c", user="u")},
        users={"u": User(token_file=str(token_file))},
        current_context="x",
    ).get()
    assert config is not None
    return config


class _Server:
    """Takes one token, and keeps what it was asked."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        """Method, path and parameters."""
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, request.path, dict(request.query)))
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "message": "who?"}, status=401)
        if request.path.endswith("/plain"):
            return web.Response(status=429, text="slow down", headers={"Retry-After": "7"})
        return web.json_response({"kind": "Pod"})


async def test_a_rotated_token_is_read_again_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    token_file, played = tmp_path / "token", _Server("first")
    token_file.write_text("first\n")
    async with TestServer(played.app) as server:
        api = Api(_config(str(server.make_url("/")), token_file))
        try:
            assert await api.request("GET", "/api/v1/pods") == {"kind": "Pod"}

            played.token = "second"
            token_file.write_text("second\n")
            assert await api.request("GET", "/api/v1/pods") == {"kind": "Pod"}
            assert len(played.asked) == 3

            played.token = "third"
            with pytest.raises(ApiRefusal) as caught:
                await api.request("GET", "/api/v1/pods")
            assert caught.value.code == 401
        finally:
            await api.close()


async def test_paths_lie_below_the_servers_own_and_parameters_arrive_as_given(
    tmp_path: Path,
) -> None:
    token_file, played = tmp_path / "token", _Server("t")
    token_file.write_text("t")
    async with TestServer(played.app) as server:
        api = Api(_config(f"{server.make_url('/')}clusters/a/", token_file))
        try:
            params = {"fieldSelector": "type=Warning,regarding.name=a b"}
            await api.request("GET", "/api/v1/pods", params=params)
        finally:
            await api.close()

    ((_, path, given),) = played.asked
    assert path == "/clusters/a/api/v1/pods"
    assert given == params


async def test_an_answer_that_is_no_status_is_quoted_and_its_wait_is_kept(tmp_path: Path) -> None:
    token_file, played = tmp_path / "token", _Server("t")
    token_file.write_text("t")
    calls: list[tuple[str, str, int]] = []
    async with TestServer(played.app) as server:
        api = Api(_config(str(server.make_url("/")), token_file), lambda *call: calls.append(call))
        try:
            with pytest.raises(ApiRefusal, match="slow down") as caught:
                await api.request("GET", "/api/plain")
        finally:
            await api.close()

    assert caught.value.retry_after_s == 7.0
    assert calls == [("GET", "/api/plain", 429)]


async def test_a_server_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    token_file, played = tmp_path / "token", _Server("t")
    token_file.write_text("t")
    calls: list[tuple[str, str, int]] = []
    async with TestServer(played.app) as server:
        url = str(server.make_url("/"))
    api = Api(_config(url, token_file), lambda *call: calls.append(call))
    try:
        with pytest.raises(ApiUnreachable):
            await api.request("GET", "/api/v1/pods")
    finally:
        await api.close()

    assert calls == [("GET", "/api/v1/pods", 0)]
