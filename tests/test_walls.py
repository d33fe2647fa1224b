"""Who may import whom, read from the sources and seen in a process that serves. Each check is shown to fail, too."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOMS = ("benchmarks", "bin", "cache", "compile", "runtime", "server")
MODULES = sorted(str(path.relative_to(REPOSITORY)) for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))
MODELS = ("flax", "torch", "transformers")  # what serving must not wait for
# Where imports may lead, ours and foreign; a room may always import from itself.
MAY_IMPORT = {
    "cache": (),
    "compile": ("cache",),
    "runtime": ("cache",),
    "server": ("cache", "runtime"),
    "bin": ("cache", "runtime"),
    "benchmarks": ("cache", "compile", "runtime"),
}
WEB = ("fastapi", "pydantic", "starlette", "uvicorn")  # an engine is embedded in services of any kind
FORBIDDEN = {
    "cache": (*MODELS, *WEB, "ray"),
    "compile": (*WEB, "ray"),
    "runtime": (*MODELS, *WEB, "ray"),
    "server": MODELS,
    "bin": (*MODELS, "ray"),
    "benchmarks": WEB,
}
EXTRAS = ("datasets", "matplotlib", "torch", "transformers")  # imported where they are used, by who has them
WORKERS = ("benchmarks/peer_torch.py", "benchmarks/peer_torch_forward.py")  # processes of their own, for nothing else
BUILDING = tuple(  # one command
    f"bin/{name}.py" for name in ("precompile", "job", "place", "rebuild", "plan", "build_report", "bucket_table")
)
EXCEPTIONS = {
    *((module, "dflash_aot.compile") for module in BUILDING),
    ("bin/bench.py", "dflash_aot.benchmarks"),
    ("bin/serve.py", "dflash_aot.server"),
    *(
        (module, package)
        for module in MODULES
        if module.startswith("benchmarks/") and module not in WORKERS
        for package in EXTRAS
    ),
    *((f"compile/pipeline/ray_{name}.py", "ray") for name in ("cluster", "worker")),
    (
        "runtime/text/chat_template.py",
        "transformers",
    ),  # chat templates, inside a function
}


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """All imported names, dotted, and whether importing the module imports them; hidden imports as "?"."""
    tree = ast.parse(source)
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        at_once = id(node) not in lazy
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{'.' * node.level}{node.module or ''}.{alias.name}", at_once) for alias in node.names)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in ("__import__", "import_module"):
                yield "?", at_once


def begins(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def violations(module: str, source: str) -> list[str]:
    """Imports in `module`, named like "runtime/engine_loop.py", that go through a wall."""
    room = module.partition("/")[0]
    open_rooms = tuple(f"dflash_aot.{other}" for other in (room, *MAY_IMPORT[room]))
    found = []
    for name, at_once in imports(source):
        if any(module == excepted and begins(name, package) for excepted, package in EXCEPTIONS):
            if at_once and not begins(name, "dflash_aot"):
                found.append(f"{module} imports {name} at once")
            continue
        wrong = (
            name.startswith((".", "?", "importlib.import_module"))
            or begins(name, "jax._src")
            or any(begins(name, package) for package in FORBIDDEN[room])
            or (begins(name, "dflash_aot") and not any(begins(name, one) for one in open_rooms))
        )
        if wrong:
            found.append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_no_import_goes_through_a_wall(module):
    assert violations(module, (REPOSITORY / module).read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cache/thing.py", "import dflash_aot.runtime.engine"),
        ("cache/thing.py", "from dflash_aot.compile import manager"),
        ("cache/thing.py", "from dflash_aot import compile"),
        ("cache/thing.py", "import dflash_aot"),
        ("compile/thing.py", "from dflash_aot.runtime.engine import Engine"),
        ("compile/thing.py", "from jax._src import core"),
        ("compile/thing.py", "import jax._src.core as core"),
        ("compile/thing.py", "from jax import _src"),
        ("runtime/thing.py", "import os, dflash_aot.compile.models.layers"),
        ("runtime/thing.py", "def lazy():\n    from dflash_aot.compile import layers"),
        ("runtime/thing.py", "if TYPE_CHECKING:\n    import flax.nnx"),
        ("runtime/thing.py", "try:\n    import transformers\nexcept ImportError:\n    pass"),
        ("runtime/text/chat_template.py", "import transformers"),
        ("runtime/text/chat_template.py", "class Chat:\n    from transformers import AutoTokenizer"),
        ("runtime/text/chat_template.py", "def lazy():\n    import flax"),
        ("runtime/thing.py", "from dflash_aot.bin import command"),
        ("runtime/thing.py", "from . import engine"),
        ("runtime/thing.py", "from ..compile import layers"),
        ("runtime/thing.py", "import importlib\nimportlib.import_module('dflash_aot.compile')"),
        ("runtime/thing.py", "from importlib import import_module"),
        ("runtime/thing.py", "__import__('flax')"),
        ("bin/run.py", "from dflash_aot.compile.pipeline.compilation_manager import build"),
        ("bin/run.py", "import flax"),
        ("bin/thing.py", "def lazy():\n    import dflash_aot.compile"),
        ("bin/thing.py", "def lazy():\n    from dflash_aot.benchmarks import record"),
        ("runtime/thing.py", "from dflash_aot.benchmarks import record"),
        ("benchmarks/thing.py", "from dflash_aot.bin.command_line import format_table"),
        ("benchmarks/pictures.py", "import matplotlib"),
    ],
)
def test_an_import_through_a_wall_is_found(module, source):
    assert violations(module, source) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cache/thing.py", "import json\nfrom dflash_aot.cache.grid import Grid"),
        ("compile/thing.py", "import flax.nnx\nimport jax\nfrom dflash_aot.cache.grid import Grid"),
        ("runtime/thing.py", "from jax.experimental import serialize_executable"),
        ("runtime/text/chat_template.py", "def lazy():\n    from transformers import PreTrainedTokenizerFast"),
        ("bin/precompile.py", "from dflash_aot.compile.pipeline.compilation_manager import build"),
        ("bin/run.py", "from dflash_aot.runtime.engine import Engine"),
        ("bin/bench.py", "from dflash_aot.benchmarks.record import Record"),
        ("benchmarks/thing.py", "import flax.nnx\nfrom dflash_aot.compile.programs.programs import Programs"),
        ("benchmarks/pictures.py", "def lazy():\n    import matplotlib"),
        ("runtime/thing.py", "NAMES = ('jax._src.core', 'flax')"),
    ],
)
def test_what_is_allowed_is_not_found(module, source):
    assert violations(module, source) == []


SERVE = """
import json, sys
{before}
import dflash_aot.bin.run
from dflash_aot.runtime import Engine, SamplingParams

with Engine.open(sys.argv[1], target=sys.argv[2]) as engine:
    result = engine.generate("def", SamplingParams(max_tokens=4, stop=["never"]))
    assert len(result.token_ids) == 4 and isinstance(result.text, str)
print(json.dumps(sorted(sys.modules)))
"""


def modules_after_serving(bundle, target, before: str = "") -> list[str]:
    """Those that have no business there, in a process that opens an engine and generates text."""
    command = [sys.executable, "-c", SERVE.format(before=before), str(bundle("tiny")), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = ("dflash_aot.compile", "dflash_aot.benchmarks")
    unwanted = (*MODELS, *ours, "fsspec", "huggingface_hub", "prometheus_client")
    return [name for name in json.loads(done.stdout) if any(begins(name, package) for package in unwanted)]


def test_a_process_that_serves_never_imports_model_code(bundle, speaking_target):
    assert modules_after_serving(bundle, speaking_target) == []


def test_a_process_that_is_watched_has_loaded_what_that_needs(bundle, speaking_target):
    found = modules_after_serving(bundle, speaking_target, before="import dflash_aot.runtime.metrics.prometheus")
    assert "prometheus_client" in found


def test_a_process_that_imports_model_code_is_found(bundle, speaking_target):
    found = modules_after_serving(bundle, speaking_target, before="import dflash_aot.compile.programs.programs")
    assert "dflash_aot.compile.programs.programs" in found and "flax" in found
