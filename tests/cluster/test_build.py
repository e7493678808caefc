"""What is built, when it is built again, and what a machine without a fitting Go is told."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvoy_cluster import build as building
from kvoy_cluster import go_modules
from kvoy_cluster.build import BuildError, build, folder_name
from kvoy_cluster.folders import cluster_home
from kvoy_cluster.go_modules import ALL_MODULES, ETCD, KUBE, GoModule

_TOOLCHAIN = "go1.26.8 linux/amd64"


@pytest.fixture
def etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GoModule:
    """A copy that a test may change."""
    shutil.copytree(ETCD.folder, tmp_path / "go" / "etcd")
    monkeypatch.setattr(go_modules, "GO_MODULES", tmp_path / "go")
    return ETCD


@pytest.fixture
def no_cached_answer() -> Iterator[None]:
    """What was learnt about this machine's Go is forgotten, and what the test makes of it, too."""
    building._toolchain.cache_clear()
    yield
    building._toolchain.cache_clear()


@pytest.mark.parametrize("module", ALL_MODULES, ids=lambda module: module.name)
def test_every_module_is_pinned(module: GoModule) -> None:
    text = (module.folder / "go.mod").read_text()

    assert module.version in text or not module.requires
    assert (module.folder / "go.sum").exists() or "require" not in text
    assert tuple(map(int, module.go_version.split("."))) >= (1, 26)


def test_kubernetes_says_its_version() -> None:
    flags = KUBE.linker_flags()

    assert f"-X k8s.io/component-base/version.gitVersion={KUBE.version} " in flags
    assert "version.gitMinor=37 " in flags


def test_equal_sources_have_equal_keys_and_any_change_another(etcd: GoModule) -> None:
    key = etcd.key(_TOOLCHAIN)
    assert etcd.key(_TOOLCHAIN) == key

    with (etcd.folder / "go.sum").open("a") as file:
        file.write("one more line\n")

    changed = {etcd.key(_TOOLCHAIN), etcd.key("go1.27.0 linux/amd64")}
    changed.add(replace(etcd, stamps=("main.version=1",)).key(_TOOLCHAIN))
    assert len(changed | {key}) == 4


@pytest.mark.usefixtures("no_cached_answer")
def test_a_machine_without_go_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOY_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BuildError, match=r"no `go` on PATH; .* Go 1\.26\.\d+ or newer: https"):
        build([ETCD])


@pytest.mark.usefixtures("no_cached_answer")
@pytest.mark.parametrize(
    ("version", "is_enough"), [("go1.25.9", False), ("go1.26.8", True), ("go1.27rc1", True)]
)
def test_an_older_go_is_refused(
    version: str, is_enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    go.write_text(f"#!/bin/sh\necho {version}; echo linux; echo amd64\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    if is_enough:
        assert folder_name(ETCD).startswith(f"etcd-{ETCD.version}-")
    else:
        with pytest.raises(BuildError, match=rf"this is {version}; .* Go 1\.26"):
            folder_name(ETCD)


@pytest.mark.slow
@pytest.mark.usefixtures("no_cached_answer")
def test_a_failed_build_says_what_go_says_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "go" / "broken"
    broken.mkdir(parents=True)
    (broken / "go.mod").write_text("module broken\n\ngo 1.26.0\n")
    (broken / "main.go").write_text("package main\n\nfunc main() { nonsense() }\n")
    monkeypatch.setattr(go_modules, "GO_MODULES", tmp_path / "go")
    monkeypatch.setenv("KVOY_HOME", str(tmp_path / "home"))

    with pytest.raises(BuildError, match="undefined: nonsense"):
        build([GoModule("broken", ".")], report=lambda line: None)

    assert [path.name for path in (cluster_home() / "bin").iterdir()] == [".lock"]
