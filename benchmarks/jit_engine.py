"""The same programs and the same loop through plain `jax.jit`: what every start costs without a bundle.

Run by startup.py in a process of its own: prints one JSON line with the seconds from process start to first token.
"""

import json
import sys
from pathlib import Path

import jax

from dflash_aot.bin.command import seconds_since_process_start
from dflash_aot.cache.checkpoint import locate_checkpoint
from dflash_aot.cache.manifest import read_manifest
from dflash_aot.cache.mesh import make_mesh
from dflash_aot.compile.lowering import jit_program
from dflash_aot.compile.programs import Programs
from dflash_aot.runtime.bundle import Bundle, bundle_devices, call_once
from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.executable import DeviceState, Executable
from dflash_aot.runtime.opening import Opened, choose_depth
from dflash_aot.runtime.sampling_params import SamplingParams
from dflash_aot.runtime.weights import load_weights


def open_engine(path: Path) -> Engine:
    """What `Engine.open` does, with every executable jitted instead of loaded."""
    manifest = read_manifest(path)
    programs = Programs(manifest.target.facts, manifest.draft.facts, manifest.dtype, sampling=manifest.sampling)
    places = {
        "target": locate_checkpoint(manifest.target.reference, "target"),
        "draft": locate_checkpoint(manifest.draft.reference, "draft"),
    }
    devices = bundle_devices(manifest)
    weights = load_weights(manifest.weights, places, devices)
    state = DeviceState(manifest.state, devices)
    known, executables = manifest.known_arrays(), []
    for entry in manifest.entries:
        signature = entry.signature
        jitted = jit_program(signature, programs.function(signature), known, make_mesh(devices))
        executable = Executable(signature, jitted)
        executable.bind(weights)
        call_once(executable, state)
        executables.append(executable)
    bundle = Bundle(path, manifest, manifest.grid.k[-1], executables)
    return Engine(Opened(bundle, state, choose_depth(bundle, state, "auto"), places["target"], {}))


def main(bundle: str, prompt: str, cache: str) -> None:
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with open_engine(Path(bundle)) as engine:
        stream = iter(engine.stream(prompt, SamplingParams(max_tokens=16)))
        first = next(stream)
        seconds = seconds_since_process_start()
        tokens = [token for delta in (first, *stream) for token in delta.token_ids]
        print(json.dumps({"seconds": seconds, "token_ids": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
