"""Import rules: which package may import which, what a serving process loads, and that imports have no side effects."""

import ast
import graphlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("benchmarks", "bin", "cache", "compile", "runtime", "server")
MODULES = sorted(
    str(path.relative_to(REPOSITORY)) for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")
)
MODELS = ("flax", "torch", "transformers")  # slow to import, not needed to serve
# The other packages of the project that each package may import.
MAY_IMPORT = {
    "cache": (),
    "compile": ("cache",),
    "runtime": ("cache",),
    "server": ("cache", "runtime"),
    "bin": ("cache", "runtime"),
    "benchmarks": ("cache", "compile", "runtime"),
}
# A service that embeds the engine may use another web framework.
WEB = ("fastapi", "pydantic", "pydantic_core", "starlette", "uvicorn")
# Distributions that each package must not import.
FORBIDDEN = {
    "cache": (*MODELS, *WEB, "ray"),
    "compile": (*WEB, "ray"),
    "runtime": (*MODELS, *WEB, "ray"),
    "server": MODELS,
    "bin": (*MODELS, "ray"),
    "benchmarks": WEB,
}
EXTRAS = ("datasets", "matplotlib", "torch", "transformers")  # imported inside functions: they may not be installed
WORKERS = ("benchmarks/torch_worker.py",)  # run as a subprocess, which needs torch at once
BUILDING = ("bin/precompile.py", "bin/precompile_report.py", "bin/emulation_check.py")  # the commands that compile
EXCEPTIONS = {
    *((module, "dflash_aot.compile") for module in BUILDING),
    ("bin/bench.py", "dflash_aot.benchmarks"),
    ("bin/run.py", "dflash_aot.server"),  # inside functions, for chats
    ("bin/serve.py", "dflash_aot.server"),
    *(
        (module, package)
        for module in MODULES
        if module.startswith("benchmarks/") and module not in WORKERS
        for package in EXTRAS
    ),
    ("compile/pipeline/ray_pool.py", "ray"),
    ("cache/model_config/tensor_names.py", "pydantic_core"),  # Rust's regular expressions, which take linear time
    ("runtime/guard.py", "transformers"),  # inside a function
}


def list_imports(source: str) -> Iterator[tuple[str, bool]]:
    """All imported names, dotted, and whether importing the module imports them; "?" for a dynamic import."""
    tree = ast.parse(source)
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        eager = id(node) not in lazy
        if isinstance(node, ast.Import):
            yield from ((alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{'.' * node.level}{node.module or ''}.{alias.name}", eager) for alias in node.names)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in ("__import__", "import_module"):
                yield "?", eager


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def find_violations(module: str, source: str) -> list[str]:
    """Imports in `module`, named like "runtime/engine_loop.py", that the rules forbid."""
    package = module.partition("/")[0]
    allowed = tuple(f"dflash_aot.{other}" for other in (package, *MAY_IMPORT[package]))
    found = []
    for name, eager in list_imports(source):
        if any(module == excepted and is_in(name, other) for excepted, other in EXCEPTIONS):
            if eager and not is_in(name, "dflash_aot"):
                found.append(f"{module} imports {name} outside a function")
            continue
        wrong = (
            name.startswith((".", "?", "importlib.import_module"))
            or is_in(name, "jax._src")
            or any(is_in(name, other) for other in FORBIDDEN[package])
            or (is_in(name, "dflash_aot") and not any(is_in(name, other) for other in allowed))
        )
        if wrong:
            found.append(f"{module} imports {name}")
    return found


def find_module(name: str, modules: Collection[str]) -> str | None:
    """The module that a dotted import names, or that holds what the import names; None for a package itself."""
    parts = name.removeprefix("dflash_aot.").split(".")
    for end in (len(parts), len(parts) - 1):
        module = "/".join(parts[:end]) + ".py"
        if module in modules:
            return module
    return None


def find_cycle(sources: Mapping[str, str], by_package: bool) -> list[str]:
    """Modules, or sub-packages, that import each other in a circle; imports inside functions count."""

    def find_node(module: str) -> str:
        folder = module.rpartition("/")[0]
        return folder if by_package and "/" in folder else module

    graph: dict[str, set[str]] = defaultdict(set)
    for module, source in sources.items():
        for name, _ in list_imports(source):
            if is_in(name, "dflash_aot") and (other := find_module(name, sources)):
                graph[find_node(module)].add(find_node(other))
    for node, others in graph.items():
        others.discard(node)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("by_package", [False, True], ids=["modules", "packages"])
def test_nothing_imports_itself_through_others(by_package):
    sources = {module: (REPOSITORY / module).read_text() for module in MODULES}
    assert find_cycle(sources, by_package) == []


def test_modules_keep_the_import_rules():
    found = [find_violations(module, (REPOSITORY / module).read_text()) for module in MODULES]
    assert sum(found, []) == []


FORBIDDEN_IMPORTS = (
    ("compile/thing.py", "from jax import _src"),
    ("runtime/thing.py", "import os, dflash_aot.compile.models.layers"),
    ("runtime/thing.py", "def lazy():\n    from dflash_aot.compile import layers"),
    ("runtime/guard.py", "class Chat:\n    from transformers import AutoTokenizer"),
    ("runtime/thing.py", "from . import engine"),
    ("runtime/thing.py", "from importlib import import_module"),
    ("runtime/thing.py", "__import__('flax')"),
    ("benchmarks/record.py", "import matplotlib"),
)


def test_forbidden_import_is_found():
    assert [one for one in FORBIDDEN_IMPORTS if not find_violations(*one)] == []


SERVE = """
import json, sys
import dflash_aot.bin.run
from dflash_aot.runtime import Engine, SamplingParams

with Engine.open(sys.argv[1], target=sys.argv[2]) as engine:
    result = engine.generate("def", SamplingParams(max_tokens=4, stop=["never"]))
    assert len(result.token_ids) == 4 and isinstance(result.text, str)
print(json.dumps(sorted(sys.modules)))
"""


def test_serving_process_never_imports_model_code(bundle, speaking_target):
    command = [sys.executable, "-c", SERVE, str(bundle("tiny")), str(speaking_target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    unneeded = (
        *MODELS,
        "dflash_aot.compile",
        "dflash_aot.benchmarks",
        "fsspec",
        "huggingface_hub",
        "prometheus_client",
    )
    assert "dflash_aot.runtime.engine" in loaded
    assert [name for name in loaded if any(is_in(name, package) for package in unneeded)] == []


# -- side effects

SIDE_EFFECTS = """
import gc, importlib, json, logging, os, signal, sys
import jax


def read_state():
    return {
        "signals": [str(signal.getsignal(number)) for number in signal.Signals],
        "gc": [gc.isenabled(), gc.get_freeze_count()],
        "environ": dict(os.environ),
        "jax": {name: str(value) for name, value in jax.config.values.items()},
        "logging": [str(logging.getLogger().handlers), logging.getLogger().level],
    }


changed, before = {}, read_state()
for module in sys.argv[1:]:
    importlib.import_module(module)
    changed[module], before = [name for name, value in read_state().items() if value != before[name]], read_state()
print(json.dumps(changed))
"""


def test_imports_have_no_side_effects(tmp_path):
    """Signal handlers, the garbage collector, the environment, JAX and logging are configured by `main`."""
    (tmp_path / "effects.py").write_text(
        "import gc, logging, os, signal\n"
        "import jax\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "gc.disable()\n"
        "os.environ['DFLASH_TEST'] = '1'\n"
        "jax.config.update('jax_traceback_in_locations_limit', 0)\n"
        "logging.basicConfig()\n"
    )
    names = [module.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for module in MODULES]
    # Not benchmarks, which import packages that may not be installed, nor Ray, which sets an environment variable.
    modules = [f"dflash_aot.{name}" for name in names if not name.startswith("benchmarks") and ".ray_" not in name]
    assert "dflash_aot.bin.run" in modules
    expected = {**dict.fromkeys(modules, []), "effects": ["signals", "gc", "environ", "jax", "logging"]}
    command = [sys.executable, "-c", SIDE_EFFECTS, *expected]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
