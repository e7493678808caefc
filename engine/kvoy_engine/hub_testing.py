"""A stand-in for a Hugging Face hub on loopback: the few endpoints that a download uses.

Serves repositories from memory, answers range requests, can cut or hold a connection inside a file,
ask for a token, refuse everything, lie about a size, or damage what it sends. Set `HF_ENDPOINT` to
its `url`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

_MAX_HOLD_S = 60
LARGE_BYTES = 4096
"""Files from this size on count as large ones, which have a SHA-256."""


@dataclass(slots=True)
class Repository:
    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    branches: tuple[str, ...] = ("main",)
    token: str | None = None
    """Needed as bearer token when set."""
    is_gated: bool = False


@dataclass(slots=True)
class Faults:
    """What goes wrong; tests change it while the hub runs."""

    cut_after: dict[str, int] = field(default_factory=dict)
    """File name to the bytes after which its next transfer breaks off; then it is forgotten."""
    hold_after: dict[str, int] = field(default_factory=dict)
    """File name to the bytes after which its next transfer waits for `release`."""
    release: threading.Event = field(default_factory=threading.Event)
    damaged: set[str] = field(default_factory=set)
    """Files that arrive with a wrong byte."""
    status: int | None = None
    """Answered to every request."""
    listed_sizes: dict[str, int] = field(default_factory=dict)
    """Sizes in listings instead of the files' own."""


class StandInHub:
    """Context manager; `requests` records (method, path, range header)."""

    def __init__(
        self, repositories: dict[str, Repository], address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        """`address`: host and port to listen at; a free port by default."""
        self.repositories = repositories
        self.faults = Faults()
        self.requests: list[tuple[str, str, str | None]] = []
        self._server = ThreadingHTTPServer(address, _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def ranges_of(self, name: str) -> list[str | None]:
        """The range headers of the transfers of a file, in order."""
        return [
            requested
            for method, path, requested in self.requests
            if method == "GET" and path.endswith(f"/{name}")
        ]


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if len(data) >= LARGE_BYTES else blob_id(data)


def _handler(hub: StandInHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("range")))
            parts = path.strip("/").split("/")
            is_api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if is_api else parts[:2])
            repository = hub.repositories.get(name)
            if hub.faults.status is not None:
                return self._refuse(hub.faults.status, "")
            if repository is None:
                return self._refuse(404, "RepoNotFound")
            if repository.is_gated:
                return self._refuse(403, "GatedRepo")
            wanted = f"Bearer {repository.token}"
            if repository.token and self.headers.get("authorization") != wanted:
                return self._refuse(401, "RepoNotFound")
            if is_api:
                return self._describe(name, repository, parts[4:])
            if len(parts) < 5 or not _knows(repository, parts[3]):
                return self._refuse(404, "RevisionNotFound")
            return self._send_file(repository, "/".join(parts[4:]), with_body)

        def _describe(self, name: str, repository: Repository, rest: list[str]) -> None:
            if len(rest) > 1 and not _knows(repository, rest[1]):
                return self._refuse(404, "RevisionNotFound")
            if rest[:1] == ["tree"]:
                return self._send_json([_tree_entry(*item) for item in repository.files.items()])
            siblings = [_sibling(*item) for item in repository.files.items()]
            for entry in siblings:
                entry["size"] = hub.faults.listed_sizes.get(str(entry["rfilename"]), entry["size"])
            return self._send_json(
                {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings}
            )

        def _send_json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_file(self, repository: Repository, name: str, with_body: bool) -> None:
            data = repository.files.get(name)
            if data is None:
                return self._refuse(404, "EntryNotFound")
            requested = self.headers.get("range")
            start = int(requested.removeprefix("bytes=").split("-")[0]) if requested else 0
            self.send_response(206 if requested else 200)
            if requested:
                self.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("x-repo-commit", repository.commit)
            self.send_header("etag", f'"{etag(data)}"')
            self.send_header("accept-ranges", "bytes")
            self.send_header("content-length", str(len(data) - start))
            self.end_headers()
            if with_body:
                self._send_bytes(name, data, start)
            return None

        def _send_bytes(self, name: str, data: bytes, start: int) -> None:
            with contextlib.suppress(ConnectionError):  # the client may be killed meanwhile
                self._write_bytes(name, data, start)

        def _write_bytes(self, name: str, data: bytes, start: int) -> None:
            if name in hub.faults.damaged:
                data = data[:-1] + bytes([data[-1] ^ 1])
            if (held := hub.faults.hold_after.pop(name, None)) is not None:
                self.wfile.write(data[start:held])
                self.wfile.flush()
                hub.faults.release.wait(_MAX_HOLD_S)
                start = held
            cut = hub.faults.cut_after.pop(name, None)
            self.wfile.write(data[start : None if cut is None else start + cut])
            self.wfile.flush()
            if cut is not None:
                self.close_connection = True

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("x-error-code", code)
            self.send_header("x-error-message", code)
            self.send_header("content-length", "0")
            self.end_headers()

    return Handler


def _knows(repository: Repository, revision: str) -> bool:
    return revision == repository.commit or revision in repository.branches


def _sibling(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": blob_id(data)}
    if len(data) >= LARGE_BYTES:
        sha256 = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
    return entry


def _tree_entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data)}
    entry["oid"] = blob_id(data)
    if len(data) >= LARGE_BYTES:
        sha256 = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 134}
    return entry
