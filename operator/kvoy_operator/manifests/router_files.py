"""What of users' own Secrets a router reads: API keys, and the certificate of its endpoint. Pure.

Both are mounted as folders, which the kubelet brings up to date, and followed by the router. A
Secret or a key that is missing holds a pod back before it starts, and an Event says which.
"""

from __future__ import annotations

from typing import Final

from kvoy_operator.identity import Manifest
from kvoy_operator.spec_router import RouterOptions

_KEYS_VOLUME: Final = "api-keys"
_KEYS_FOLDER: Final = "/etc/kvoy/api-keys"
_KEYS_FILE: Final = "keys.yaml"
_TLS_VOLUME: Final = "tls"
_TLS_FOLDER: Final = "/etc/kvoy/tls"
_CERTIFICATE: Final = "tls.crt"
_TLS_KEY: Final = "tls.key"
_MODE: Final = 0o440
"""For the router's user, who is in the group that owns the volume, and for nobody else."""


def file_arguments(settings: RouterOptions) -> list[str]:
    arguments = []
    if settings.api_keys_secret_ref:
        arguments.append(f"--keys-file={_KEYS_FOLDER}/{_KEYS_FILE}")
    if settings.tls_secret_ref:
        arguments.append(f"--tls-certificate={_TLS_FOLDER}/{_CERTIFICATE}")
        arguments.append(f"--tls-key={_TLS_FOLDER}/{_TLS_KEY}")
    return arguments


def file_volumes(settings: RouterOptions) -> list[Manifest]:
    volumes = []
    if keys := settings.api_keys_secret_ref:
        volumes.append(_volume(_KEYS_VOLUME, keys.name, {keys.key: _KEYS_FILE}))
    if tls := settings.tls_secret_ref:
        files = {_CERTIFICATE: _CERTIFICATE, _TLS_KEY: _TLS_KEY}
        volumes.append(_volume(_TLS_VOLUME, tls.name, files))
    return volumes


def file_mounts(settings: RouterOptions) -> list[Manifest]:
    folders = {
        _KEYS_VOLUME: (settings.api_keys_secret_ref, _KEYS_FOLDER),
        _TLS_VOLUME: (settings.tls_secret_ref, _TLS_FOLDER),
    }
    return [
        {"name": name, "mountPath": folder, "readOnly": True}
        for name, (reference, folder) in folders.items()
        if reference
    ]


def _volume(name: str, secret: str, paths: dict[str, str]) -> Manifest:
    """`paths` by key of the Secret."""
    items = [{"key": key, "path": path} for key, path in paths.items()]
    return {"name": name, "secret": {"secretName": secret, "items": items, "defaultMode": _MODE}}
