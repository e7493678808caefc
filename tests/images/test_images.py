"""The images as built: small, without torch where it is not needed, unprivileged, and clean.

Built by `tools/images.sh archives`, which needs no image registry; what is not built here is the
image for CUDA.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.containers]

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tools" / "images.sh"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MIB = 1 << 20

REFERENCES = {
    "router": f"localhost/kvoy/router:{VERSION}",
    "operator": f"localhost/kvoy/operator:{VERSION}",
    "engine-sim": f"localhost/kvoy/engine:{VERSION}-sim",
}
OWN = "opt/kvoy/"
"""Where an image has all that it adds to its base."""


@dataclass(frozen=True, slots=True)
class Layer:
    digest: str
    sizes: Mapping[str, int]
    """Of each file and link, uncompressed."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class Image:
    reference: str
    config: dict[str, Any]
    layers: tuple[Layer, ...]
    """The base first."""

    @property
    def names(self) -> list[str]:
        return [name for layer in self.layers for name in layer.sizes]

    @property
    def added(self) -> list[str]:
        """In all layers above the base; files that something was mounted over are empty."""
        sizes = {name: size for layer in self.layers[1:] for name, size in layer.sizes.items()}
        return [name for name, size in sizes.items() if size]


def read_image(archive: Path) -> Image:
    with tarfile.open(archive) as tar:

        def blob(digest: str) -> bytes:
            member = tar.extractfile(f"blobs/{digest.replace(':', '/')}")
            assert member is not None
            return member.read()

        index = tar.extractfile("index.json")
        assert index is not None
        (entry,) = json.load(index)["manifests"]
        manifest = json.loads(blob(entry["digest"]))
        config = json.loads(blob(manifest["config"]["digest"]))["config"]
        layers = tuple(
            read_layer(layer["digest"], blob(layer["digest"])) for layer in manifest["layers"]
        )
    return Image(entry["annotations"]["org.opencontainers.image.ref.name"], config, layers)


def read_layer(digest: str, data: bytes) -> Layer:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return Layer(digest, {m.name: m.size for m in tar.getmembers() if not m.isdir()})


@pytest.fixture(scope="module")
def images() -> dict[str, Image]:
    done = subprocess.run(
        [str(SCRIPT), "archives", *REFERENCES],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(zip(REFERENCES, map(read_image, map(Path, done.stdout.split())), strict=True))


@pytest.fixture(params=REFERENCES)
def image(request: pytest.FixtureRequest, images: dict[str, Image]) -> Image:
    return images[request.param]


@pytest.mark.parametrize("name", REFERENCES)
def test_an_image_is_called_what_chart_and_operator_call_it(
    images: dict[str, Image], name: str
) -> None:
    assert images[name].reference == REFERENCES[name]


def test_an_image_adds_less_than_150_mb_to_its_base(image: Image) -> None:
    added = sum(layer.num_bytes for layer in image.layers[1:])

    assert 10 * MIB < added < 150_000_000


def test_all_images_stand_on_the_same_base(images: dict[str, Image]) -> None:
    assert len({image.layers[0].digest for image in images.values()}) == 1


def test_there_is_neither_torch_nor_what_comes_with_it(image: Image) -> None:
    heavy = re.compile(r"site-packages/(torch|nvidia|triton|transformers|safetensors)(-|/|$)")

    assert not [name for name in image.names if heavy.search(name)]


def test_there_is_no_compiler_and_no_installer(image: Image) -> None:
    tools = re.compile(r"(^|/)(g\+\+|gcc|cc|c\+\+|clang|uv|pip3?)(-[\d.]+)?$|site-packages/pip/")

    assert not [name for name in image.names if tools.search(name)]


def test_nothing_of_the_building_machine_is_in_an_image(image: Image) -> None:
    """No certificates, no settings of package indexes, no caches, no sources."""
    allowed = re.compile(rf"^({OWN}|home/kvoy/\.|etc/(passwd|group|g?shadow|sub[ug]id)-?$)")

    assert not [name for name in image.added if not allowed.match(name)]


def test_modules_are_compiled_since_a_container_cannot_write_them(image: Image) -> None:
    sources = [n for n in image.names if re.search(r"/kvoy_contract/[a-z_]+\.py$", n)]

    assert sources
    for source in sources:
        folder, _, file = source.rpartition("/")
        stem = file.removesuffix(".py")
        assert any(name.startswith(f"{folder}/__pycache__/{stem}.cpython-") for name in image.names)


@pytest.mark.parametrize("name", REFERENCES)
def test_an_image_runs_unprivileged_and_says_what_it_is(
    images: dict[str, Image], name: str
) -> None:
    config = images[name].config

    assert config["User"] == "65532:65532"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["kvoy"]
    assert "PATH=/opt/kvoy/bin:" in " ".join(config["Env"])
    assert config["Labels"]["org.opencontainers.image.title"] == f"kvoy-{name}"
    assert config["Labels"]["org.opencontainers.image.version"] == VERSION
    assert not [variable for variable in config["Env"] if re.search("CERT|INDEX|TOKEN", variable)]


def test_an_archive_is_made_once(images: dict[str, Image]) -> None:
    done = subprocess.run(
        [str(SCRIPT), "archives", "router"], capture_output=True, text=True, check=True
    )

    assert Path(done.stdout.strip()).is_file()
    assert done.stderr == ""
