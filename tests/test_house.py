"""The house itself: packages that the wheel lists, versions that were tested. Each rule is also shown to fail."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
ROOMS = {"benchmarks", "bin", "cache", "compile", "runtime", "server"}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PINS = (REPOSITORY / "constraints.txt").read_text().splitlines()
SCRIPTS = "examples"
# Which extras a folder may import from besides the dependencies.
EXTRAS = {
    **dict.fromkeys(ROOMS, ()),
    "benchmarks": ("bench",),
    "compile": ("ray",),
    "server": ("ray",),
    SCRIPTS: ("train", "ray"),
    "tests": ("test", "bench", "ray"),
}
TESTED_EXTRAS = ("test", "train", "bench", "dev", "tpu", "s3", "ray")  # cuda needs its machine


def modules(house: Path, folders: Iterable[str] = tuple(EXTRAS)) -> list[Path]:
    return sorted(path for folder in folders for path in (house / folder).rglob("*.py"))


def list_packages(house: Path) -> set[str]:
    """Import names of all packages of the rooms."""
    places = (path.parent for room in ROOMS for path in (house / room).rglob("__init__.py"))
    return {f"dflash_aot.{place.relative_to(house).as_posix().replace('/', '.')}" for place in places}


def unpackaged(house: Path) -> list[str]:
    """Modules in a folder without `__init__.py`: an editable install finds them, the wheel lacks them."""
    return [path.name for path in modules(house, ROOMS) if not (path.parent / "__init__.py").exists()]


def undocumented(house: Path) -> list[str]:
    return [path.name for path in modules(house) if not ast.get_docstring(ast.parse(path.read_text()))]


def shadowing(house: Path) -> list[str]:
    """Modules that hide one of Python's own from a script beside them."""
    return [path.name for path in modules(house) if path.stem in sys.stdlib_module_names]


def imported(path: Path) -> set[str]:
    """Top-level names of all imports in a file, wherever in it they stand; relative ones as "."."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else (node.module or "").partition(".")[0])
    return names


def undeclared(house: Path, project: Mapping) -> list[str]:
    """Imports that only work because another package happens to need the same distribution."""
    distributions = importlib.metadata.packages_distributions()
    known = {*sys.stdlib_module_names, "dflash_aot"}
    scripts = {path.stem for path in modules(house, [SCRIPTS])}
    siblings = {SCRIPTS: scripts, "tests": {"tests"}}  # may import one another
    found = []
    for folder, extras in EXTRAS.items():
        declared = {canonicalize_name(one.name) for one in requirements(project, extras)}
        for path in modules(house, [folder]):
            for name in sorted(imported(path) - known - siblings.get(folder, set())):
                if declared.isdisjoint(map(canonicalize_name, distributions.get(name, ()))):
                    found.append(f"{path.name} imports {name}")
    return found


def requirements(project: Mapping, extras: Iterable[str] = ()) -> list[Requirement]:
    """Direct ones, of the project and of these extras."""
    lines = [*project["project"]["dependencies"]]
    for extra in extras:
        lines += project["project"]["optional-dependencies"][extra]
    return [one for one in map(Requirement, lines) if one.name != project["project"]["name"]]


def unpinned(wanted: Iterable[Requirement], pins: Iterable[str]) -> list[str]:
    """Requirements without a pin, or with one outside their range."""
    versions = dict(pin.split("==") for pin in pins if "==" in pin)
    versions = {canonicalize_name(name): version for name, version in versions.items()}
    return [str(one) for one in wanted if versions.get(canonicalize_name(one.name), "none") not in one.specifier]


def impersonal(pins: Iterable[str]) -> list[str]:
    """Lines that are neither a comment nor name==version: a path, a link, the tag of one machine's build."""
    return [pin for pin in pins if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", pin)]


def test_every_module_is_in_a_package():
    assert unpackaged(REPOSITORY) == []


def test_every_module_says_what_it_is():
    assert undocumented(REPOSITORY) == []


def test_no_module_is_named_after_a_standard_one():
    assert shadowing(REPOSITORY) == []


def test_every_import_is_a_declared_dependency():
    assert undeclared(REPOSITORY, PROJECT) == []


def test_the_packages_are_the_rooms():
    rooms = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")}
    setuptools = PROJECT["tool"]["setuptools"]
    assert rooms == ROOMS
    assert setuptools["package-dir"] == {f"dflash_aot.{room}": room for room in rooms}
    assert len(setuptools["packages"]) == len(set(setuptools["packages"]))
    assert set(setuptools["packages"]) == list_packages(REPOSITORY)


def test_nested_package_is_found(tmp_path):
    (tmp_path / "cache/inner").mkdir(parents=True)
    (tmp_path / "cache/inner/__init__.py").touch()
    assert list_packages(tmp_path) == {"dflash_aot.cache.inner"}


@pytest.mark.parametrize("requirement", requirements(PROJECT), ids=lambda requirement: requirement.name)
def test_installed_versions_are_in_the_tested_range(requirement):
    assert requirement.specifier.contains(importlib.metadata.version(requirement.name))


def test_jax_has_an_upper_bound():
    """Serialized executables, `no_tracing` and the ahead-of-time interface may change with every minor version."""
    (jax,) = (one for one in requirements(PROJECT) if one.name == "jax")
    assert not jax.specifier.contains("0.11.0")


def test_every_direct_dependency_is_pinned():
    assert unpinned(requirements(PROJECT, TESTED_EXTRAS), PINS) == []
    assert impersonal(PINS) == []


@pytest.mark.parametrize("command", PROJECT["project"]["scripts"])
def test_console_scripts_exist(command):
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=command)
    assert entry.value == PROJECT["project"]["scripts"][command]
    assert callable(entry.load())


@pytest.mark.parametrize(
    ("rule", "place", "text"),
    [
        (unpackaged, "cache/inner/thing.py", '"""A module."""'),
        (undocumented, "runtime/thing.py", "x = 1"),
        (shadowing, "compile/queue.py", '"""A module."""'),
    ],
)
def test_a_broken_rule_is_found(tmp_path, rule, place, text):
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert rule(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import pytest", "pytest"),
        ("from optax import adamw", "optax"),
        ("from . import grid", "."),
        ("def lazy():\n    import torch.nn", "torch"),
    ],
)
def test_an_undeclared_import_is_found(tmp_path, text, name):
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/thing.py").write_text(text)
    assert undeclared(tmp_path, PROJECT) == [f"thing.py imports {name}"]


@pytest.mark.parametrize("pins", [[], ["jax==0.10.1"], ["jaxlib==0.10.2"]])
def test_a_missing_or_wrong_pin_is_found(pins):
    assert unpinned([Requirement("jax>=0.10.2")], pins) == ["jax>=0.10.2"]
    assert unpinned([Requirement("jax>=0.10.2")], [*pins, "JAX==0.10.2"]) == []


@pytest.mark.parametrize("pin", ["torch==2.13.0+cpu", "-e /home/me/dflash", "torch @ file:///wheels/torch.whl", "jax"])
def test_a_pin_of_one_machine_is_found(pin):
    assert impersonal(["# a comment", "jax==0.10.2", pin]) == [pin]
