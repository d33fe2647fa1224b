"""Observes what JAX writes into the pickles of executables: python -m tests.compile.executable_pickles [--update]

Prints the table of the installed JAX version, in the form that `cache.bundle.pickle_scan` reads; --update writes it to
its file. Compiles programs of a published pair for one CPU device, for meshes of CPU devices and for TPUs.
"""

import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from dflash_aot.cache.bundle.pickle_machine import (
    Items,
    Name,
    PickleMachine,
    PickleSize,
    Value,
)
from dflash_aot.cache.bundle.pickle_scan import TABLES, count_arrays
from dflash_aot.cache.bundle.weight_recipe import PLAIN, WeightFormats
from dflash_aot.cache.devices import attached_devices
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.sampling_state import SAMPLING_MODES
from dflash_aot.cache.topology import TOPOLOGIES
from dflash_aot.compile.pipeline.build_target import COMPILE_ONLY, describe_devices
from dflash_aot.compile.programs.lowering import lower_program
from dflash_aot.compile.programs.program_source import TracedPrograms
from dflash_aot.compile.programs.programs import Programs

CONFIGS = Path(__file__).parents[1] / "cache" / "configs"
DEVICES = 4
ENVIRONMENT = {**COMPILE_ONLY, "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
# Platform, dtype, devices and programs; "int8": bfloat16 with weights in int8. The larger programs take long to compile
# and have no other calls.
BUILDS = [
    ("cpu", "float32", 1, ("admit", "kv_write")),
    ("cpu", "bfloat16", 2, ("admit", "kv_write")),
    ("cpu", "float32", 4, ("admit", "kv_write")),
    ("cpu", "int8", 1, ("kv_write",)),
    ("v5e:1x1", "bfloat16", 1, ("admit", "kv_write", "verify")),
    ("v5e:2x2", "bfloat16", 4, ("admit", "kv_write")),
    ("v4:2x2x1", "bfloat16", 4, ("admit",)),  # other kinds of devices
    ("tpu7x:2x2x1", "bfloat16", 8, ("admit",)),
]
GRID = "batch=1 length=64 k=7 prefill=16"
UNLIMITED = PickleSize(10**6, 10**6, 10**6)
CONSTANTS = {type(None), bool, int, str, bytes, Name}
FEW = 12  # so many combinations of constant arguments of several types are listed


def build_executables() -> Iterator[tuple[bytes, int]]:
    """Yields serialized executables, and the number of inputs and outputs of each."""
    target = read_target(_read_config("Qwen3-4B"))
    pair = target, read_draft(_read_config("Qwen3-4B-DFlash-b16"), target)
    for place, dtype, count, names in BUILDS:
        topology = TOPOLOGIES.get(place)
        devices = describe_devices(topology).devices if topology else attached_devices(place, count)
        stacked, formats = topology is not None, WeightFormats("int8", "int8") if dtype == "int8" else PLAIN
        dtype = "bfloat16" if dtype == "int8" else dtype
        programs = Programs(*pair, dtype, stacked, count, SAMPLING_MODES, formats=formats)
        source = TracedPrograms(programs, parse_grid(GRID, 16), "tpu" if topology else place, count)
        signatures = {signature.program: signature for signature in source.signatures}  # any bucket of each program
        for program in names:
            lowered = lower_program(source.export(signatures[program]), signatures[program], source.known, devices)
            yield serialize_executable.serialize(lowered.compile())[0], count_arrays(signatures[program])


def _read_config(name: str) -> ConfigFile:
    path = CONFIGS / f"{name}.json"
    return ConfigFile(path, json.loads(path.read_text()))


def observe(executables: Iterable[tuple[bytes, int]]) -> dict[str, Any]:
    """Returns the table of these pickles, each with the number of arrays of its executable."""
    calls: dict[str, list[Value]] = defaultdict(list)
    sizes = []
    for blob, arrays in executables:
        machine = PickleMachine(lambda call, arguments: calls[call].append(arguments), UNLIMITED)
        calls["result"].append(machine.follow(blob))
        used = machine.size.opcodes, machine.size.memo, machine.size.items
        sizes.append([math.ceil(size / arrays) for size in used])
    return {
        "size": dict(zip(("opcodes", "memo", "items"), map(max, *sizes), strict=True)),
        "calls": {call: infer_call(calls[call]) for call in sorted(calls)},
    }


def infer_call(arguments: list[Value]) -> Any:
    """Returns the shape of a call's arguments. Constants of several types are kept together: a dtype and its state."""
    types = set[type]().union(*map(_leaf_types, arguments))
    if types <= CONSTANTS and len(types) > 1:
        listed = {repr(value): _list_constant(value) for value in arguments}
        if len(listed) <= FEW:
            return _one_of(listed.values())
    return infer_shape(arguments)


def infer_shape(values: Iterable[Value]) -> Any:
    """Returns the shape of the values at one place: a constant where all are equal, otherwise their types."""
    groups: dict[str, list[Value]] = defaultdict(list)
    for value in {id(value): value for value in values}.values():
        groups[value.kind if isinstance(value, Items) else type(value).__name__].append(value)
    return _one_of(shape for kind in groups for shape in _infer_group(kind, groups[kind]))


def _one_of(shapes: Iterable[Any]) -> Any:
    ordered = [shape for _, shape in sorted({json.dumps(shape): shape for shape in shapes}.items())]
    return ordered[0] if len(ordered) == 1 else {"one of": ordered}


def _infer_group(kind: str, values: list[Value]) -> list[Any]:
    """Returns the shapes of values of one type."""
    match kind:
        case "int" | "str" | "bytes" if len(set(values)) > 1 or (kind == "bytes" and len(values[0]) > 8):
            return [{"any": kind}]
        case "tuple" if len({len(value) for value in values}) == 1:
            return [[infer_shape(column) for column in zip(*values, strict=True)]]
        case "tuple":
            return [{kind: infer_shape(item for value in values for item in value)}]
        case "list" | "set" | "frozenset":
            return [{kind: infer_shape(item for value in values for item in value.values)}]
        case "KeyedItems":
            places: dict[str, list[Value]] = defaultdict(list)
            for value in values:
                for key, item in value.values.items():
                    places[key].append(item)
            return [{"dict": {key: infer_shape(places[key]) for key in sorted(places)}}]
        case "Instance":
            return [{"instance": value.name} for value in values]
    return [_list_constant(value) for value in values]


def _leaf_types(value: Value) -> set[type]:
    return set[type]().union(*map(_leaf_types, value)) if isinstance(value, tuple) else {type(value)}


def _list_constant(value: Value) -> Any:
    match value:
        case tuple():
            return [_list_constant(part) for part in value]
        case bytes():
            return {"bytes": value.decode("latin-1")}
        case Name(text):
            return {"name": text}
    return value


def main() -> None:
    if not ENVIRONMENT.items() <= os.environ.items():  # JAX reads it when it is imported
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ENVIRONMENT})
    content = json.dumps(observe(build_executables()), indent=1) + "\n"
    if sys.argv[1:] == ["--update"]:
        (TABLES / f"{jax.__version__}.json").write_text(content)
    else:
        print(content, end="")


if __name__ == "__main__":
    main()
