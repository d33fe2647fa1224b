"""From signature to lowered program and key: what changes a key, and what must not."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import executable_key
from dflash_aot.compile.programs.lowering import (
    check_donation,
    export_program,
    input_arrays,
    output_arrays,
)
from dflash_aot.compile.programs.programs import Programs

BUCKETS = "batch=1,2 length=16,32 k=0,3 prefill=4"
VERIFY = "verify batch=2 length=32 k=3"
ELSEWHERE = """
import json, sys
import msgspec
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.devices import read_environment
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import executable_key
from dflash_aot.compile.programs.programs import Programs
from dflash_aot.compile.programs.program_source import TracedPrograms

target, draft = msgspec.json.decode(sys.stdin.read(), type=tuple[Target, Draft])
source = TracedPrograms(Programs(target, draft, "float32"), parse_grid(sys.argv[1], draft.block), "cpu")
environment = read_environment("cpu")
print(json.dumps({one.label: executable_key(source.export(one), one, environment) for one in source.signatures}))
"""


class Build:
    """All programs of a pair for a grid, lowered here when asked for."""

    def __init__(self, pair, dtype="float32", buckets=BUCKETS):
        self.programs, grid = Programs(*pair, dtype), parse_grid(buckets, pair[1].block)
        self.known = self.programs.arrays_by_name(grid)
        self.signatures = {signature.label: signature for signature in self.programs.list_signatures(grid)}

    def export(self, label, wrap=lambda function: function):
        signature = self.signatures[label]
        return export_program(signature, wrap(self.programs.function(signature)), self.known, "cpu", 1)

    def key(self, label, environment, **how):
        return executable_key(self.export(label, **how), self.signatures[label], environment)

    def keys(self, environment):
        return {label: self.key(label, environment) for label in self.signatures}


@pytest.fixture(scope="module")
def small_build(small_pair):
    return Build(small_pair)


@pytest.fixture(scope="module")
def verify_key(small_build, environment):
    return small_build.key(VERIFY, environment)


def test_the_same_program_has_the_same_key(small_pair, environment, verify_key):
    assert Build(small_pair).key(VERIFY, environment) == verify_key


def test_every_executable_has_its_own_key(small_build, environment):
    keys = small_build.keys(environment)
    assert len(set(keys.values())) == len(keys) == len(small_build.signatures)


def test_another_process_in_another_directory_finds_the_same_keys(small_pair, small_build, environment, tmp_path):
    elsewhere = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, BUCKETS],
        input=msgspec.json.encode(small_pair),
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        check=True,
    )
    assert json.loads(elsewhere.stdout) == small_build.keys(environment)


def test_where_a_program_stands_in_its_source_is_not_in_the_key(small_build, environment, verify_key):
    moved = small_build.key(VERIFY, environment, wrap=lambda function: lambda arrays: function(arrays))
    assert moved == verify_key


def test_another_dtype_is_another_key(small_pair, environment, verify_key):
    assert Build(small_pair, dtype="bfloat16").key(VERIFY, environment) != verify_key


@pytest.mark.parametrize(
    ("buckets", "label"),
    [
        ("batch=1,3 length=16,32 k=0,3 prefill=4", "verify batch=3 length=32 k=3"),
        ("batch=1,2 length=16,40 k=0,3 prefill=4", "verify batch=2 length=40 k=3"),
        ("batch=1,2 length=16,32 k=0,2 prefill=4", "verify batch=2 length=32 k=2"),
        ("batch=1,2,4 length=16,32 k=0,3 prefill=4", VERIFY),  # more slots: the same bucket on larger arrays
        ("batch=1,2 length=16,32 k=0,3 prefill=8", VERIFY),  # more slack, likewise
    ],
)
def test_another_bucket_or_state_is_another_key(small_pair, environment, verify_key, buckets, label):
    assert Build(small_pair, buckets=buckets).key(label, environment) != verify_key


def test_a_grid_that_grows_in_between_keeps_its_keys(small_pair, environment, verify_key):
    wider = Build(small_pair, buckets="batch=1,2 length=16,24,32 k=0,1,3 prefill=2,4")
    assert wider.key(VERIFY, environment) == verify_key


@pytest.mark.parametrize("field", Environment.__struct_fields__)
def test_another_environment_is_another_key(small_build, environment, verify_key, field):
    other = {str: "other", int: 7, tuple: ("other",)}[type(getattr(environment, field))]
    assert small_build.key(VERIFY, structs.replace(environment, **{field: other})) != verify_key


@pytest.mark.parametrize(
    "change", [{"weights": ("another",)}, {"state": ()}, {"donated": ()}, {"bucket": {"batch": 3}}, {"results": ()}]
)
def test_the_same_code_behind_another_signature_is_another_key(small_build, environment, verify_key, change):
    other = structs.replace(small_build.signatures[VERIFY], **change)
    assert executable_key(small_build.export(VERIFY), other, environment) != verify_key


def test_another_rope_is_another_key(small_pair, environment, verify_key):
    target, draft = small_pair
    rope = structs.replace(target.decoder.rope, theta=20_000.0)
    other = structs.replace(target, decoder=structs.replace(target.decoder, rope=rope))
    assert Build((other, draft)).key(VERIFY, environment) != verify_key


def test_a_program_that_does_not_return_what_its_signature_says_is_refused(small_build):
    def narrow(function):
        return lambda arrays: {**function(arrays), "verdict": jnp.zeros((2, 8), jnp.int16)}

    with pytest.raises(AssertionError, match=f"{VERIFY}: .*verdict.*int16"):
        small_build.export(VERIFY, wrap=narrow)


def test_donated_state_comes_back_first_and_in_order(small_build):
    for signature in small_build.signatures.values():
        inputs, outputs = (names(signature, small_build.known) for names in (input_arrays, output_arrays))
        donated = len(signature.donated)
        assert inputs[len(signature.weights) :][:donated] == outputs[:donated]


def test_donation_that_did_not_take_is_a_failure(small_build):
    signature = small_build.signatures["move"]
    check_donation(signature, signature.state)
    with pytest.raises(BuildFailed, match="donation failed: anchors, target_v are copied instead of written in place"):
        check_donation(signature, [name for name in signature.state if name not in ("target_v", "anchors")])
