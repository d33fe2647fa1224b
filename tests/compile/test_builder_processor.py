"""A program's bytes do not depend on the processor of the machine that builds."""

import json
import os
import subprocess
import sys

import msgspec
from msgspec import structs
from numpy._core import _multiarray_umath as numpy_core  # numpy has no public list of the features that it uses

from dflash_aot.cache.model_config.architecture import AttentionShape
from dflash_aot.cache.model_config.rope import Rope, YarnScaling

FEATURES = [name for name in numpy_core.__cpu_dispatch__ if numpy_core.__cpu_features__.get(name)]
PLAIN_PROCESSOR = {
    "NPY_DISABLE_CPU_FEATURES": " ".join(FEATURES),
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA,-FMA4",  # for Python's `math` and `**`
    "PYTHONHASHSEED": "12345",
}
# Bases of which the C library computes a power differently without FMA, in the last bit of a float64.
THETAS = (170e3, 180e3, 220e3, 380e3, 810e3, 860e3, 1200e3, 1220e3, 1500e3)
BUILD = f"""
import hashlib, json, sys
import msgspec
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.compile.programs.program_source import TracedPrograms
from dflash_aot.compile.programs.programs import STACKED, UNROLLED, Programs

pair = msgspec.json.decode(sys.stdin.read(), type=tuple[Target, Draft])
v5e = Environment("1", "1", "1", "tpu", "", "TPU v5 lite", "v5e:1x1", 1, ("0,0,0,0",), "", (), "", "")
found = {{"keys": {{}}, "programs": {{}}}}
for platform, form in (("cpu", UNROLLED), ("tpu", STACKED)):
    programs = Programs(*pair, "float32", form, sampling=("sample",))
    source = TracedPrograms(programs, parse_grid("batch=1 length=16 k=3 prefill=8", pair[1].block), platform)
    for signature in source.signatures:
        program, label = source.export(signature), f"{{platform}} {{signature.label}}"
        found["programs"][label] = hashlib.sha256(program).hexdigest()
        if platform == "tpu":
            found["keys"][label] = executable_key(program, signature, v5e)
found["frequencies"] = {{theta: Rope(theta, 128).inverse_frequencies() for theta in {THETAS}}}
print(json.dumps(found))
"""


def test_builds_of_two_processors_are_equal(small_pair):
    """On this processor, and on one with its baseline of instructions and another hash seed."""
    rope = Rope(1_200_000.0, 128, YarnScaling(4.0, 32, 32.0, 1.0, True, 1.1386294361119891))
    wide = {"attention": AttentionShape(heads=4, kv_heads=2, head_dim=128), "rope": rope}
    pair = [structs.replace(model, decoder=structs.replace(model.decoder, **wide)) for model in small_pair]
    here, plain = (build(pair, variables) for variables in ({}, PLAIN_PROCESSOR))
    assert here == plain
    assert all(len(set(map(str, found.values()))) == len(found) for found in here.values())


def build(pair, variables: dict[str, str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        input=msgspec.json.encode(pair),
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)
