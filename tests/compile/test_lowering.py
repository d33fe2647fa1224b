"""Lowering from signature to StableHLO and key: what changes a key and what does not."""

import json
import math
import os
import re
import subprocess
import sys
from functools import cache

import jax.numpy as jnp
import msgspec
import pytest
from jax import export
from msgspec import structs
from numpy._core import _multiarray_umath as numpy_core

from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.model_config.architecture import AttentionShape
from dflash_aot.cache.model_config.rope import Rope, YarnScaling
from dflash_aot.compile.models.backend import CPU, STACKED_CPU, TPU
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.programs.lowering import check_donation, export_program
from dflash_aot.compile.programs.programs import Programs, TracedPrograms
from tests.compile.conftest import read_published
from tests.conftest import JAX_SWITCHES

BUCKETS = "batch=1,2 length=16,32 k=0,3 prefill=4"
VERIFY = "verify batch=2 length=32 k=3"


class Build:
    """All programs of a pair for a grid, exported on demand and once."""

    def __init__(self, pair, dtype="float32", buckets=BUCKETS):
        self.programs, grid = Programs(*pair, dtype), parse_grid(buckets, pair[1].block)
        self.known = self.programs.arrays_by_name(grid)
        self.signatures = {signature.label: signature for signature in self.programs.list_signatures(grid)}
        self.export = cache(self.export_anew)

    def export_anew(self, label, wrap=lambda function: function):
        signature = self.signatures[label]
        return export_program(signature, wrap(self.programs.function(signature)), self.known, CPU, 1)

    def key(self, label, environment):
        return executable_key(self.export(label), self.signatures[label], environment)

    def keys(self, environment):
        return {label: self.key(label, environment) for label in self.signatures}


@pytest.fixture(scope="module")
def small_build(small_pair):
    return Build(small_pair)


@pytest.fixture(scope="module")
def verify_key(small_build, environment):
    return small_build.key(VERIFY, environment)


def test_every_executable_has_its_own_key(small_build, environment):
    keys = small_build.keys(environment)
    assert len(set(keys.values())) == len(keys) == len(small_build.signatures)


def test_source_location_does_not_change_the_key(small_build, environment, verify_key):
    moved = small_build.export_anew(VERIFY, wrap=lambda function: lambda arrays: function(arrays))
    assert executable_key(moved, small_build.signatures[VERIFY], environment) == verify_key


def test_more_buckets_below_the_maximum_keep_the_key(small_pair, environment, verify_key):
    wider = Build(small_pair, buckets="batch=1,2 length=16,24,32 k=0,1,3 prefill=2,4,8")
    assert wider.key(VERIFY, environment) == verify_key


def test_every_environment_field_changes_the_key(small_build, environment, verify_key):
    for field in Environment.__struct_fields__:
        other = {str: "other", int: 7, tuple: ("other",)}[type(getattr(environment, field))]
        assert small_build.key(VERIFY, structs.replace(environment, **{field: other})) != verify_key


def test_signature_changes_the_key(small_build, environment, verify_key):
    for change in [
        {"weights": ("another",)},
        {"state": ()},
        {"donated": ()},
        {"bucket": {"batch": 3}},
        {"results": ()},
    ]:
        other = structs.replace(small_build.signatures[VERIFY], **change)
        assert executable_key(small_build.export(VERIFY), other, environment) != verify_key


def test_dtype_and_rope_change_the_key(small_pair, environment, verify_key):
    assert Build(small_pair, dtype="bfloat16").key(VERIFY, environment) != verify_key
    target, draft = small_pair
    rope = structs.replace(target.decoder.rope, theta=20_000.0)
    other = structs.replace(target, decoder=structs.replace(target.decoder, rope=rope))
    assert Build((other, draft)).key(VERIFY, environment) != verify_key


def test_outputs_that_differ_from_the_signature_are_refused(small_build):
    def narrow(function):
        return lambda arrays: {**function(arrays), "verdict": jnp.zeros((2, 8), jnp.int16)}

    with pytest.raises(AssertionError, match=f"{VERIFY}: .*verdict.*int16"):
        small_build.export_anew(VERIFY, wrap=narrow)


def test_check_donation_refuses_state_that_is_copied(small_build):
    signature = small_build.signatures["move"]
    check_donation(signature, signature.state)
    with pytest.raises(BuildFailed, match="donation failed: anchors, lengths are copied instead of written in place"):
        check_donation(signature, [name for name in signature.state if name not in ("lengths", "anchors")])


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
from dflash_aot.cache.devices import ignore_jax_switches
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.compile.models.backend import CPU, TPU
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.programs.programs import TracedPrograms
from dflash_aot.compile.programs.programs import Programs

pair = msgspec.json.decode(sys.stdin.read(), type=tuple[Target, Draft])
v5e = Environment("1", "1", "1", "tpu", "", "TPU v5 lite", "v5e:1x1", 1, 1, ("0,0,0,0",), "", (), "", "")
found = {{"keys": {{}}, "programs": {{}}}}
switches = ignore_jax_switches()
switches.__enter__()
for platform, backend in (("cpu", CPU), ("tpu", TPU)):
    programs = Programs(*pair, "float32", TensorParallel(backend=backend), ("sample",))
    source = TracedPrograms(programs, parse_grid("batch=1 length=16 k=3 prefill=8", pair[1].block))
    for signature in source.signatures:
        program, label = source.export(signature), f"{{platform}} {{signature.label}}"
        found["programs"][label] = hashlib.sha256(program).hexdigest()
        if platform == "tpu":
            found["keys"][label] = executable_key(program, signature, v5e)
found["frequencies"] = {{theta: Rope(theta, 128).inverse_frequencies() for theta in {THETAS}}}
print(json.dumps(found))
"""


def test_builds_of_two_processors_are_equal(small_pair):
    """On this processor, and on one with its baseline of instructions, another hash seed and switches of JAX."""
    rope = Rope(1_200_000.0, 128, YarnScaling(4.0, 32, 32.0, 1.0, True, 1.1386294361119891))
    wide = {"attention": AttentionShape(heads=4, kv_heads=2, head_dim=128), "rope": rope}
    pair = [structs.replace(model, decoder=structs.replace(model.decoder, **wide)) for model in small_pair]
    here, plain = (build(pair, variables) for variables in ({}, PLAIN_PROCESSOR | JAX_SWITCHES))
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


VOCAB, RANK, K, CANDIDATES = 151_936, 256, 15, 16
SORTING = ("stablehlo.sort", "chlo.top_k", "@TopK", "@ApproxTopK", "mhlo.topk")


@pytest.fixture(scope="module", params=[STACKED_CPU, TPU], ids=["cpu", "tpu"])
def program(request) -> str:
    target, draft = read_published("Qwen3-8B", "Qwen3-8B-DFlash2-b16")
    source = TracedPrograms(
        Programs(target, draft, "bfloat16", TensorParallel(backend=request.param), ("sample",)),
        parse_grid(f"batch=1 length=1024 k={K} prefill=256", draft.block),
    )
    (signature,) = (one for one in source.signatures if one.label.startswith("draft"))
    return export.deserialize(bytearray(source.export(signature))).mlir_module()


def read_shape(text: str) -> tuple[int, ...]:
    """ "15x16xf32" → (15, 16)."""
    return tuple(int(size) for size in re.findall(r"(\d+)x", text))


def test_nothing_as_long_as_the_vocabulary_is_sorted(program):
    sorts = [line for line in program.splitlines() if any(name in line for name in SORTING)]
    sorted_shapes = [read_shape(found) for line in sorts for found in re.findall(r"tensor<([^>]*)>", line)]
    assert sum(len(shape) > 0 for shape in sorted_shapes) >= 2
    assert max(math.prod(shape[-1:]) for shape in sorted_shapes) <= CANDIDATES * 128, sorted_shapes


def test_each_place_reads_one_row_of_a_codebook(program):
    """The predecessor codebook: the anchor and the candidates of all positions but the last; the other: of all."""
    gathers = re.findall(rf"stablehlo.gather.*?\(tensor<{VOCAB}x{RANK}xbf16>.*?-> tensor<([^>]*)>", program)
    read = sorted(math.prod(read_shape(shape)) // RANK for shape in gathers)
    assert read == [(K - 1) * CANDIDATES + 1, K * CANDIDATES]
    assert len(re.findall(rf"(?m)^ *%\S+ = .*tensor<{VOCAB}x{RANK}xbf16>", program)) == len(gathers)  # no other reader
