"""The router's HTTP server over TLS, and certificates that change while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvoy_cluster.pki import Authority, Pair
from kvoy_router.http_message import Request
from kvoy_router.http_response import Response
from kvoy_router.http_server import Handler, HttpLimits, HttpServer
from kvoy_router.tls import TlsFiles

HOST = "127.0.0.1"
GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def echo(request: Request, response: Response) -> None:
    response.send(200, [], request.body)


class Server:
    """An authority, the files of one server's pair, and a client that trusts the authority."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority("test")
        self._folder = folder
        self._stem = folder / "server"
        self.pair = self.renew()
        (folder / "ca.crt").write_bytes(self.authority.pair.certificate_pem)
        self.client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self.files = TlsFiles(self.certificate, self.key)

    @property
    def certificate(self) -> Path:
        return self._stem.with_name("server.crt")

    @property
    def key(self) -> Path:
        return self._stem.with_name("server.key")

    def renew(self) -> Pair:
        self.pair = self.authority.sign("router", hosts=[HOST])
        for path in (self._folder / "server.crt", self._folder / "server.key"):
            path.unlink(missing_ok=True)
        self.pair.write(self._stem)
        return self.pair

    @contextlib.asynccontextmanager
    async def serving(self, handler: Handler = echo) -> AsyncIterator[HttpServer]:
        http = HttpServer(handler, HttpLimits(sweep_s=0.02, drain_idle_s=0.02))
        await http.listen(HOST, 0, ssl=self.files.context)
        try:
            yield http
        finally:
            await http.drain(0.2)

    async def connect(self, http: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, http.port, ssl=self.client)

    async def shown_serial(self, http: HttpServer) -> int:
        """Of the certificate that a new connection is shown."""
        _, writer = await self.connect(http)
        serial = int(writer.get_extra_info("peercert")["serialNumber"], 16)
        writer.close()
        return serial


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


async def test_requests_and_large_bodies_travel_both_ways(server: Server) -> None:
    body = bytes(range(256)) * 8192
    async with server.serving() as http:
        reader, writer = await server.connect(http)
        head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)

        answer = await asyncio.wait_for(reader.read(), 30)

        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"\r\n\r\n" + body)
        writer.close()


async def test_a_client_without_tls_gets_nothing_and_harms_nobody(server: Server) -> None:
    async with server.serving() as http:
        reader, writer = await asyncio.open_connection(HOST, http.port)
        writer.write(GET)

        with contextlib.suppress(ConnectionError):
            assert b"200" not in await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert await server.shown_serial(http) == server.pair.certificate.serial_number


async def test_a_client_that_leaves_cancels_its_request(server: Server) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(request: Request, response: Response) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with server.serving(endless) as http:
        _, writer = await server.connect(http)
        writer.write(GET)
        await begun.wait()
        writer.transport.abort()

        await asyncio.wait_for(cancelled.wait(), 30)


async def test_old_versions_of_tls_are_refused(server: Server) -> None:
    assert server.files.context.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_new_connections_are_shown_a_renewed_certificate_and_open_ones_go_on(
    server: Server,
) -> None:
    async with server.serving() as http:
        first = server.pair.certificate.serial_number
        assert await server.shown_serial(http) == first
        reader, writer = await server.connect(http)

        server.renew()
        server.files.check()

        assert await server.shown_serial(http) == server.pair.certificate.serial_number != first
        writer.write(GET)
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_pair_that_does_not_fit_changes_nothing_until_it_does(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    first = server.pair.certificate.serial_number
    old_key = server.key.read_bytes()
    server.renew()
    new_key = server.key.read_bytes()
    server.key.write_bytes(old_key)

    with caplog.at_level(logging.ERROR):
        server.files.check()
        server.files.check()
    assert "server.key" in (server.files.error or "")
    assert len(caplog.records) == 1
    async with server.serving() as http:
        assert await server.shown_serial(http) == first

        server.key.write_bytes(new_key)
        server.files.check()
        assert not server.files.error
        assert await server.shown_serial(http) == server.pair.certificate.serial_number


def test_files_that_are_gone_for_a_moment_change_nothing(server: Server) -> None:
    server.certificate.unlink()
    server.files.check()
    assert "server.crt" in (server.files.error or "")

    server.renew()
    server.files.check()
    assert server.files.error is None


@pytest.mark.parametrize("broken", ["missing", "text", "other key"])
def test_a_bad_pair_at_the_start_is_an_error_that_names_the_files(
    server: Server, broken: str
) -> None:
    if broken == "missing":
        server.key.unlink()
    elif broken == "text":
        server.certificate.write_text("certificate")
    else:
        server.key.write_bytes(server.authority.sign("other").key_pem)

    with pytest.raises((OSError, ValueError), match=r"server\.(key|crt)"):
        TlsFiles(server.certificate, server.key)
