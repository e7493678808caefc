"""A small client of the Kubernetes API, for polling: kubectl takes a second for each answer."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"

_TIMEOUT_S = 60.0


class ApiError(Exception):
    """The API answered with an error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status


class Api:
    """Talks with the API as a kubeconfig's user does. May be used from several threads."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        user = config["users"][0]["user"]
        self._address = urlsplit(cluster["server"])
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.load_verify_locations(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        # The ssl module reads a client's pair from a file only.
        pair = kubeconfig.with_suffix(".pem")
        pair.touch(mode=0o600)
        pair.write_bytes(
            base64.b64decode(user["client-certificate-data"])
            + base64.b64decode(user["client-key-data"])
        )
        self._context.load_cert_chain(pair)

    def get(self, path: str) -> Any:
        """The object or list at `path`. Raises ApiError, and OSError without a connection."""
        return self.request("GET", path)

    def exists(self, path: str) -> bool:
        try:
            self.get(path)
        except ApiError as error:
            if error.status == http.client.NOT_FOUND:
                return False
            raise
        return True

    def apply(self, path: str, body: object, manager: str = "kvoy-cluster") -> Any:
        """Server-side apply of `body` at `path`, which may be a subresource."""
        query = f"fieldManager={manager}&force=true"
        return self.request("PATCH", f"{path}?{query}", body, APPLY_PATCH)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Any:
        """Sends `body` as JSON. The answer's JSON, or its text where it is none."""
        assert self._address.hostname is not None
        connection = http.client.HTTPSConnection(
            self._address.hostname, self._address.port, timeout=_TIMEOUT_S, context=self._context
        )
        try:
            data = None if body is None else json.dumps(body)
            headers = {"Content-Type": content_type, "Accept": accept}
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= http.client.BAD_REQUEST:
            raise ApiError(answer.status, text)
        is_json = answer.headers.get_content_type() == "application/json"
        return json.loads(text) if is_json else text
