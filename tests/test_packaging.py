"""Packaging: the packages in the wheel, declared dependencies, tested versions, console scripts."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"benchmarks", "bin", "cache", "compile", "runtime", "server"}  # directly below dflash_aot
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PINS = (REPOSITORY / "constraints.txt").read_text().splitlines()
SCRIPTS = "examples"
# The extras whose dependencies a folder may import, besides the project's dependencies.
EXTRAS = {
    **dict.fromkeys(PACKAGES, ()),
    "benchmarks": ("bench",),
    "compile": ("ray",),
    "server": ("ray",),
    SCRIPTS: ("train", "ray"),
    "tests": ("test", "bench", "ray"),
}
TESTED_EXTRAS = ("test", "train", "bench", "dev", "tpu", "s3", "ray")  # not cuda: it cannot be installed everywhere


def find_modules(root: Path, folders: Iterable[str] = tuple(EXTRAS)) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def list_packages(root: Path) -> set[str]:
    """Import names of all packages, nested ones included."""
    folders = (path.parent for package in PACKAGES for path in (root / package).rglob("__init__.py"))
    return {f"dflash_aot.{folder.relative_to(root).as_posix().replace('/', '.')}" for folder in folders}


def find_unpackaged(root: Path) -> list[str]:
    """Modules in a folder without `__init__.py`: an editable install finds them, but the wheel lacks them."""
    return [path.name for path in find_modules(root, PACKAGES) if not (path.parent / "__init__.py").exists()]


def list_imports(path: Path) -> set[str]:
    """Top-level names of all imports anywhere in a file; "." stands for relative imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else (node.module or "").partition(".")[0])
    return names


@cache
def list_distributions() -> Mapping[str, list[str]]:
    """The distributions that provide each importable name."""
    return importlib.metadata.packages_distributions()


def find_undeclared(root: Path, project: Mapping) -> list[str]:
    """Imports of packages that are installed only because another dependency needs them."""
    known = {*sys.stdlib_module_names, "dflash_aot"}
    scripts = {path.stem for path in find_modules(root, [SCRIPTS])}
    siblings = {SCRIPTS: scripts, "tests": {"tests"}}  # modules of a folder that may import one another
    found = []
    for folder, extras in EXTRAS.items():
        declared = {canonicalize_name(requirement.name) for requirement in list_requirements(project, extras)}
        for path in find_modules(root, [folder]):
            for name in sorted(list_imports(path) - known - siblings.get(folder, set())):
                if declared.isdisjoint(map(canonicalize_name, list_distributions().get(name, ()))):
                    found.append(f"{path.name} imports {name}")
    return found


def list_requirements(project: Mapping, extras: Iterable[str] = ()) -> list[Requirement]:
    """The direct requirements of the project and of the given extras."""
    lines = [*project["project"]["dependencies"]]
    for extra in extras:
        lines += project["project"]["optional-dependencies"][extra]
    requirements = map(Requirement, lines)
    return [requirement for requirement in requirements if requirement.name != project["project"]["name"]]


def find_unpinned(requirements: Iterable[Requirement], pins: Iterable[str]) -> list[str]:
    """Requirements without a pin, or with a pin outside their range."""
    versions = dict(pin.split("==") for pin in pins if "==" in pin)
    versions = {canonicalize_name(name): version for name, version in versions.items()}
    return [
        str(requirement)
        for requirement in requirements
        if versions.get(canonicalize_name(requirement.name), "none") not in requirement.specifier
    ]


def find_local_pins(pins: Iterable[str]) -> list[str]:
    """Lines other than comments and name==version: paths, links and local builds, which exist on one machine only."""
    return [pin for pin in pins if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", pin)]


def test_every_module_is_in_a_package():
    assert find_unpackaged(REPOSITORY) == []


def test_unpackaged_module_is_found(tmp_path):
    path = tmp_path / "cache/inner/thing.py"
    path.parent.mkdir(parents=True)
    path.touch()
    assert find_unpackaged(tmp_path) == ["thing.py"]


def test_wheel_lists_every_package():
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")}
    setuptools = PROJECT["tool"]["setuptools"]
    assert packages == PACKAGES
    assert setuptools["package-dir"] == {f"dflash_aot.{package}": package for package in packages}
    assert len(setuptools["packages"]) == len(set(setuptools["packages"]))
    assert set(setuptools["packages"]) == list_packages(REPOSITORY)


def test_nested_package_is_found(tmp_path):
    (tmp_path / "cache/inner").mkdir(parents=True)
    (tmp_path / "cache/inner/__init__.py").touch()
    assert list_packages(tmp_path) == {"dflash_aot.cache.inner"}


def test_every_import_is_a_declared_dependency():
    assert find_undeclared(REPOSITORY, PROJECT) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import pytest", "pytest"),
        ("from optax import adamw", "optax"),
        ("from . import grid", "."),
        ("def lazy():\n    import torch.nn", "torch"),
    ],
)
def test_undeclared_import_is_found(tmp_path, text, name):
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/thing.py").write_text(text)
    assert find_undeclared(tmp_path, PROJECT) == [f"thing.py imports {name}"]


@pytest.mark.parametrize("requirement", list_requirements(PROJECT), ids=lambda requirement: requirement.name)
def test_installed_version_is_in_the_tested_range(requirement):
    assert requirement.specifier.contains(importlib.metadata.version(requirement.name))


def test_jax_has_an_upper_bound():
    """Serialized executables, `no_tracing` and the ahead-of-time interface may change with every minor version."""
    (jax,) = (requirement for requirement in list_requirements(PROJECT) if requirement.name == "jax")
    assert not jax.specifier.contains("0.11.0")


def test_every_direct_dependency_is_pinned():
    assert find_unpinned(list_requirements(PROJECT, TESTED_EXTRAS), PINS) == []
    assert find_local_pins(PINS) == []


@pytest.mark.parametrize("pins", [[], ["jax==0.10.1"], ["jaxlib==0.10.2"]])
def test_missing_or_wrong_pin_is_found(pins):
    assert find_unpinned([Requirement("jax>=0.10.2")], pins) == ["jax>=0.10.2"]
    assert find_unpinned([Requirement("jax>=0.10.2")], [*pins, "JAX==0.10.2"]) == []


@pytest.mark.parametrize("pin", ["torch==2.13.0+cpu", "-e /home/me/dflash", "torch @ file:///wheels/torch.whl", "jax"])
def test_local_pin_is_found(pin):
    assert find_local_pins(["# a comment", "jax==0.10.2", pin]) == [pin]


@pytest.mark.parametrize("command", PROJECT["project"]["scripts"])
def test_console_script_is_installed(command):
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=command)
    assert entry.value == PROJECT["project"]["scripts"][command]
    assert callable(entry.load())
