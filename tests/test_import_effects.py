"""Imports without side effects: no module changes signal handlers, the garbage collector, the environment or JAX."""

import json
import subprocess
import sys

ROOMS = ("cache", "runtime", "server")
# Third-party packages are imported first: their own effects are not the project's.
IMPORT_ALL = """
import gc, importlib, json, logging, os, pkgutil, signal, sys, threading
import fastapi, jax, jax.experimental.serialize_executable, prometheus_client, ray.serve, tokenizers, uvicorn

def snapshot():
    return {
        "signals": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "environ": dict(os.environ),
        "jax": {name: str(value) for name, value in jax.config.values.items()},
        "logging": [logging.root.level, len(logging.root.handlers)],
        "threads": [thread.name for thread in threading.enumerate()],
    }

before = snapshot()
for room in sys.argv[2:]:
    package = importlib.import_module(f"dflash_aot.{room}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
exec(sys.argv[1])
after = snapshot()
print(json.dumps([what for what in before if before[what] != after[what]]))
"""


def list_effects(extra: str = "") -> list[str]:
    """Returns what changes in a process that imports every module of ROOMS, and then runs the statements `extra`."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, extra, *ROOMS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_imports_have_no_side_effects():
    assert list_effects() == []


def test_side_effects_are_found():
    extra = """
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
gc.freeze()
os.environ["ADDED"] = "1"
jax.config.update("jax_platforms", "cpu,cpu")
"""
    assert list_effects(extra) == ["signals", "gc", "environ", "jax"]
