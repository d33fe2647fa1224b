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
from packaging.version import Version

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"benchmarks", "bin", "cache", "compile", "runtime", "server"}  # directly below dflash_aot
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text()
LOWEST = (REPOSITORY / "requirements/lowest.txt").read_text()
SCRIPTS = "examples"
# The extras whose dependencies a folder may import, besides the project's dependencies.
EXTRAS = {
    **dict.fromkeys(PACKAGES, ()),
    "benchmarks": ("bench",),
    "compile": ("ray",),
    "server": ("ray",),
    SCRIPTS: ("train", "ray", "smollm2"),
    "tests": ("dev", "test", "bench", "ray"),
}
THIS_PYTHON = "{}.{}".format(*sys.version_info)
LOCKS = {"requirements/cpu.txt": (), "requirements/tpu.txt": ("tpu",)}  # the extras whose packages a lock file holds
ALL_EXTRAS = tuple(PROJECT["project"]["optional-dependencies"])


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


def read_pins(text: str, python: str = THIS_PYTHON) -> dict[str, str]:
    """The version of each package in a file of pins, by canonical name, where the line's marker holds."""
    requirements = map(Requirement, re.findall(r"^[\w.-]+==[^\\\n]+", text, re.MULTILINE))
    return {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement in requirements
        if applies(requirement, python=python)
    }


def applies(requirement: Requirement, extras: Iterable[str] = (), python: str = THIS_PYTHON) -> bool:
    """Whether the requirement's marker holds for a version of Python, with any of the extras."""
    environments = [
        {"extra": extra, "python_version": python, "python_full_version": f"{python}.0"} for extra in ("", *extras)
    ]
    return requirement.marker is None or any(map(requirement.marker.evaluate, environments))


def find_unpinned(requirements: Iterable[Requirement], pins: Mapping[str, str]) -> list[str]:
    """Requirements without a pin, or with a pin outside their range."""
    return [
        str(requirement)
        for requirement in requirements
        if applies(requirement) and pins.get(canonicalize_name(requirement.name), "none") not in requirement.specifier
    ]


def find_untested_bounds(requirements: Iterable[Requirement], pins: Mapping[str, str]) -> list[str]:
    """Requirements for Python 3.11 whose lower bound is not the pinned version."""
    return [
        f"{requirement.name}{bound}"
        for requirement in requirements
        if applies(requirement, python="3.11")
        for bound in requirement.specifier
        if bound.operator == ">=" and Version(bound.version) != Version(pins[canonicalize_name(requirement.name)])
    ]


def collect_installed(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Versions of the installed packages that these requirements need, directly or not, by canonical name."""
    found: dict[str, str] = {}
    seen, queue = set(), list(filter(applies, requirements))
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if (key := (name, frozenset(requirement.extras))) in seen:
            continue
        seen.add(key)
        package = importlib.metadata.distribution(requirement.name)
        found[name] = package.version
        queue += [needed for needed in map(Requirement, package.requires or ()) if applies(needed, requirement.extras)]
    return found


def test_every_module_is_in_a_package():
    assert find_unpackaged(REPOSITORY) == []


def test_wheel_lists_every_package():
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")}
    setuptools = PROJECT["tool"]["setuptools"]
    assert packages == PACKAGES
    assert setuptools["package-dir"] == {f"dflash_aot.{package}": package for package in packages}
    assert len(setuptools["packages"]) == len(set(setuptools["packages"]))
    assert set(setuptools["packages"]) == list_packages(REPOSITORY)


def test_every_import_is_a_declared_dependency():
    assert find_undeclared(REPOSITORY, PROJECT) == []


def test_every_direct_dependency_is_pinned_and_installed():
    assert find_unpinned(list_requirements(PROJECT, ALL_EXTRAS), read_pins(CONSTRAINTS)) == []
    for requirement in filter(applies, list_requirements(PROJECT)):
        assert importlib.metadata.version(requirement.name) in requirement.specifier


def test_clients_are_locked_as_they_are_listed():
    listed = read_pins((REPOSITORY / "tests/server/clients.txt").read_text().replace("[openai]", ""))
    locked = read_pins((REPOSITORY / "requirements/clients.txt").read_text())
    assert len(listed) == 6 and listed.items() <= locked.items()


def test_lower_bounds_are_the_lowest_tested_versions():
    assert find_untested_bounds(list_requirements(PROJECT, ALL_EXTRAS), read_pins(LOWEST, "3.11")) == []


@pytest.mark.parametrize("file", LOCKS)
def test_lock_holds_what_a_deployment_needs(file):
    text = (REPOSITORY / file).read_text()
    pins = read_pins(text)
    needed = collect_installed(list_requirements(PROJECT, LOCKS[file]))
    assert sorted(pins) == sorted(needed)
    tested = read_pins(CONSTRAINTS)
    assert pins == {name: tested[name] for name in pins}
    assert len(re.findall(r"^[\w.-]+==.* \\\n    --hash=sha256:", text, re.MULTILINE)) == len(
        re.findall("==", re.sub(" ; .*", "", text))
    )


def test_console_scripts_are_installed():
    scripts = {entry.name: entry for entry in importlib.metadata.entry_points(group="console_scripts")}
    for command, value in PROJECT["project"]["scripts"].items():
        assert scripts[command].value == value
        assert callable(scripts[command].load())
