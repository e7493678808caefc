"""The packaging hazards of six packages in one distribution, each as a test.

A folder of a component is never a package itself: `operator/__init__.py` would hide Python's own
`operator` module from everything that runs in the root.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
COMPONENTS = ["contract", "engine", "router", "operator", "simulate", "cli"]


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_s_folder_holds_its_package_and_nothing_else_python_could_import(
    component: str,
) -> None:
    entries = {path.name for path in (ROOT / component).iterdir()} - {"__pycache__"}

    assert f"kvoy_{component}" in entries
    assert "__init__.py" not in entries
    assert not {name for name in entries if name.endswith(".py")}
    assert (ROOT / component / f"kvoy_{component}" / "__init__.py").is_file()


@pytest.mark.parametrize("component", COMPONENTS)
def test_no_module_hides_one_of_the_standard_library(component: str) -> None:
    package = ROOT / component / f"kvoy_{component}"
    allowed = {"__main__", "__init__"}

    names = {path.stem for path in package.glob("*.py")} - allowed

    # Inside a package only a script in that folder is fooled; at a component's top, everybody.
    assert not {path.stem for path in (ROOT / component).iterdir()} & sys.stdlib_module_names
    assert not names & {"types", "typing", "logging", "socket", "signal", "operator", "token"}


def test_tests_are_no_packages() -> None:
    packages = {file.parent for file in (ROOT / "tests").rglob("__init__.py")}

    # Packages are helpers that several folders of tests share, under names that hide nothing.
    assert not {package for package in packages if not package.name.startswith("kvoy_")}
    assert not {package for package in packages if list(package.rglob("test_*.py"))}


@pytest.mark.parametrize("module", ["operator", "types", "collections", "asyncio"])
def test_the_standard_library_is_found_from_the_root(module: str) -> None:
    code = f"import {module}; print({module}.__file__)"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert not Path(done.stdout.strip()).is_relative_to(ROOT / "operator")


def test_the_wheel_has_every_package() -> None:
    packages = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    assert packages == [f"{component}/kvoy_{component}" for component in COMPONENTS]


def test_the_router_needs_neither_torch_nor_what_comes_with_it() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]

    needed = [*project["dependencies"], *extras["router"], *extras["server"], *extras["sim"]]

    heavy = ("torch", "transformers", "safetensors", "numpy", "gguf", "kvoy[engine")
    assert not [requirement for requirement in needed if requirement.startswith(heavy)]


def test_generated_stubs_are_committed() -> None:
    stubs = ROOT / "contract/kvoy_contract/proto/kvoy/v1"
    names = ["telemetry_pb2.py", "telemetry_pb2.pyi", "telemetry_pb2_grpc.py"]

    listed = subprocess.run(
        ["git", "ls-files", str(stubs)], cwd=ROOT, capture_output=True, text=True, check=False
    )

    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    assert set(names) <= {Path(line).name for line in listed.stdout.splitlines()}
