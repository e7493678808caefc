"""A scripted OpenAI endpoint on loopback for the command's own client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class ScriptedEndpoint:
    """Answers each chat with the words of `words`; keeps the bodies that came."""

    def __init__(self) -> None:
        self.words = ["Par", "is", "."]
        self.models = ["tiny"]
        self.bodies: list[dict[str, Any]] = []
        self.authorization: list[str | None] = []
        self.refusal: tuple[int, str] | None = None
        self.error_in_stream: str | None = None
        self.is_cut = False
        self.client_left = threading.Event()
        """A client went away before its answer had ended."""
        self.num_endless = 0
        """So many of the first answers end only when their client leaves."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    running = ScriptedEndpoint()
    yield running
    running.close()


def _handler(endpoint: ScriptedEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            body = {"object": "list", "data": [{"id": name} for name in endpoint.models]}
            self._send(200, json.dumps(body).encode(), "application/json")

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            endpoint.bodies.append(json.loads(self.rfile.read(length)))
            is_endless = len(endpoint.bodies) <= endpoint.num_endless
            endpoint.authorization.append(self.headers.get("authorization"))
            if endpoint.refusal is not None:
                status, message = endpoint.refusal
                body = json.dumps({"error": {"message": message}}).encode()
                return self._send(status, body, "application/json")
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("x-kvoy-engine", "127.0.0.1:8101")
            self.end_headers()
            try:
                self._stream(is_endless)
            except OSError:
                endpoint.client_left.set()
            return None

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, is_endless: bool) -> None:
            for word in endpoint.words:
                self._event({"choices": [{"index": 0, "delta": {"content": word}}]})
            while is_endless:
                self._event({"choices": [{"index": 0, "delta": {"content": "more "}}]})
            if endpoint.error_in_stream:
                self._event({"error": {"message": endpoint.error_in_stream}})
            if endpoint.is_cut:
                return
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43}
            details = {"prompt_tokens_details": {"cached_tokens": 32}}
            self._event({"choices": [], "usage": usage | details})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, value: object) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
            self.wfile.flush()

    return Handler
