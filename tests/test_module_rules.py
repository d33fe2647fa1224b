"""Rules for every module: class names that mean one thing, no crumbs."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.conftest import LONGEST

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("benchmarks", "bin", "cache", "compile", "runtime", "server")
FEWEST_LINES = 40
SHORT_MODULES: dict[str, str] = {}  # and why each is a file of its own
SHARED_CLASS_NAMES = {"Settings": "each benchmark declares its flags in a class of this name"}


def find_modules(root: Path) -> list[Path]:
    return sorted(path for folder in PACKAGES for path in (root / folder).rglob("*.py"))


def find_shared_class_names(root: Path) -> dict[str, list[str]]:
    """Public top-level classes with the same name, and the modules that define them."""
    places = defaultdict(list)
    for path in find_modules(root):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(root).as_posix())
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def find_short_modules(root: Path) -> Iterator[str]:
    """Modules with fewer lines than a module should have. A package's `__init__.py` may be empty."""
    for path in find_modules(root):
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < FEWEST_LINES:
            yield path.relative_to(root).as_posix()


def check_exceptions(found: set[str], allowed: Mapping[str, str]) -> None:
    """Fails for what is found without being allowed, and for what is allowed without need."""
    assert sorted(found - allowed.keys()) == []
    assert sorted(allowed.keys() - found) == []


def test_no_two_classes_have_the_same_name():
    check_exceptions(set(find_shared_class_names(REPOSITORY)), SHARED_CLASS_NAMES)


def test_no_module_is_short_without_a_reason():
    check_exceptions(set(find_short_modules(REPOSITORY)), SHORT_MODULES)


def test_files_that_run_first_exist():
    assert [name for name in LONGEST if not (REPOSITORY / name).is_file()] == []
