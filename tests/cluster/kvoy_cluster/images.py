"""Images for the cluster's own use, as OCI archives made of plain files: no registry needed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

PAUSE_IMAGE = "localhost/kvoy-cluster/pause:1"
"""Runs as the first process of each pod."""
PROBE_IMAGE = "localhost/kvoy-cluster/probe:1"
"""For tests: the command `/probe`, see its source in `go/probe`."""

_NOBODY = "65532:65532"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def write_archives(folder: Path, probe: Path) -> list[Path]:
    """The archives of both images, made of the static program `probe`."""
    pause = _write(folder / "pause.tar", PAUSE_IMAGE, probe, ["/probe", "pause"])
    return [pause, _write(folder / "probe.tar", PROBE_IMAGE, probe, ["/probe"])]


def _write(archive: Path, reference: str, program: Path, entrypoint: list[str]) -> Path:
    """One layer with the program alone."""
    blobs: dict[str, bytes] = {}
    layer = _tar({f"{program.name}": program.read_bytes()}, mode=0o755)
    layer_entry = _add(blobs, layer, _LAYER)
    config = {
        "architecture": _architecture(program),
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "User": _NOBODY},
        "rootfs": {"type": "layers", "diff_ids": [layer_entry["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _add(blobs, _json(config), _CONFIG),
        "layers": [layer_entry],
    }
    entry = _add(blobs, _json(manifest), _MANIFEST)
    entry["annotations"] = {"io.containerd.image.name": reference}
    files = {f"blobs/sha256/{digest}": data for digest, data in blobs.items()}
    files["oci-layout"] = _json({"imageLayoutVersion": "1.0.0"})
    files["index.json"] = _json({"schemaVersion": 2, "manifests": [entry]})
    archive.write_bytes(_tar(files, mode=0o644))
    return archive


def _architecture(program: Path) -> str:
    """From the ELF header: what this machine calls itself is of no matter to containerd."""
    machine = int.from_bytes(program.read_bytes()[18:20], "little")
    return {0x3E: "amd64", 0xB7: "arm64"}[machine]


def _add(blobs: dict[str, bytes], data: bytes, media_type: str) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    blobs[digest] = data
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _tar(files: dict[str, bytes], mode: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = mode
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
