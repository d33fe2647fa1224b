"""A program's bytes do not depend on the processor of the machine that builds."""

import json
import os
import subprocess
import sys
from platform import libc_ver

import msgspec
import pytest
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
import msgspec, numpy as np
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
found["frequencies"] = [Rope(theta, 128).inverse_frequencies() for theta in {THETAS}]
found["powers"] = [[theta ** (-2 * i / 128) for i in range(64)] for theta in {THETAS}]
found["numpy"] = np.exp(np.linspace(0, 3, 4096, dtype=np.float32)).tolist()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def builds(small_pair) -> tuple[dict, dict]:
    """What a build finds on this processor, and on one with its baseline of instructions and another hash seed."""
    rope = Rope(1_200_000.0, 128, YarnScaling(4.0, 32, 32.0, 1.0, True, 1.1386294361119891))
    wide = {"attention": AttentionShape(heads=4, kv_heads=2, head_dim=128), "rope": rope}
    pair = [structs.replace(model, decoder=structs.replace(model.decoder, **wide)) for model in small_pair]
    here, plain = (_build(pair, variables) for variables in ({}, PLAIN_PROCESSOR))
    return here, plain


def test_builds_of_two_processors_are_equal(builds):
    for what in ["keys", "programs", "frequencies"]:
        here, plain = builds
        assert here[what] == plain[what]
        assert len(set(map(str, here[what].values() if isinstance(here[what], dict) else here[what]))) == len(
            here[what]
        )


@pytest.mark.skipif(
    libc_ver()[0] != "glibc" or not {"X86_V3", "FMA3"} & set(FEATURES), reason="needs glibc, AVX2 and FMA"
)
def test_plain_processor_computes_other_numbers(builds):
    """Without this difference the comparison of builds would show nothing."""
    for what in ["powers", "numpy"]:
        here, plain = builds
        assert here[what] != plain[what]


def _build(pair, variables: dict[str, str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        input=msgspec.json.encode(pair),
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)
