"""Lowering from signature to StableHLO and key: what changes a key and what does not."""

from functools import cache

import jax.numpy as jnp
import pytest
from msgspec import structs

from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import executable_key
from dflash_aot.compile.programs.lowering import (
    check_donation,
    export_program,
)
from dflash_aot.compile.programs.programs import Programs

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
        return export_program(signature, wrap(self.programs.function(signature)), self.known, "cpu", 1)

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


def test_bucket_and_state_shape_change_the_key(small_pair, environment, verify_key):
    for buckets, label in [
        ("batch=1,3 length=16,32 k=0,3 prefill=4", "verify batch=3 length=32 k=3"),
        ("batch=1,2,4 length=16,32 k=0,3 prefill=4", VERIFY),  # more slots: the same bucket of larger arrays
        ("batch=1,2 length=16,32 k=0,3 prefill=4 kv_positions=32", VERIFY),  # fewer pages: smaller ones
        ("batch=1,2 length=16,32 k=0,3 prefill=4 page=8", VERIFY),
    ]:
        assert Build(small_pair, buckets=buckets).key(label, environment) != verify_key


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
