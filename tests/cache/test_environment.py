"""Whether what was built on one machine runs on another, field by field."""

import os
import subprocess
import sys

import jax
import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.environment import Difference, Environment, differences, read_environment

PLAIN_FIELDS = [field for field in Environment.__struct_fields__ if field != "cpu_features"]


def test_a_machine_fits_itself(environment):
    assert differences(environment, environment) == []


@pytest.mark.parametrize("field", PLAIN_FIELDS)
def test_every_field_that_differs_is_named_with_both_values(environment, field):
    value = getattr(environment, field)
    other = value + 1 if isinstance(value, int) else "other"
    here = structs.replace(environment, **{field: other})
    assert differences(environment, here) == [Difference(field, str(value), str(other))]


def test_all_differences_are_told_at_once(environment):
    here = structs.replace(environment, jax="0.11", machine="aarch64", cpu_features=())
    assert [difference.field for difference in differences(environment, here)] == ["jax", "machine", "cpu_features"]


def test_a_processor_that_can_more_is_fine(environment):
    here = structs.replace(environment, cpu_features=("amx_int8", *environment.cpu_features, "vaes"))
    assert differences(environment, here) == []


def test_a_processor_that_lacks_an_instruction_set_is_not(environment):
    here = structs.replace(environment, cpu_features=("sse4_2", "vaes"))
    assert differences(environment, here) == [Difference("cpu_features", "uses avx2 fma", "not on this processor")]


def test_this_machine_is_what_jax_says_it_is():
    here = read_environment("cpu")
    assert (here.jax, here.platform, here.device_kind) == (jax.__version__, "cpu", jax.devices("cpu")[0].device_kind)
    assert here.cpu_features == tuple(sorted(set(here.cpu_features)))
    assert here == msgspec.json.decode(msgspec.json.encode(here), type=Environment)


def test_an_accelerator_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="no_such_platform"):
        read_environment("no_such_platform")


def test_compiler_flags_are_part_of_the_environment():
    report = "from dflash_aot.cache.environment import read_environment; print(read_environment('cpu').xla_flags)"
    flags = "--xla_cpu_enable_fast_math=false"
    found = subprocess.run(
        [sys.executable, "-c", report],
        env={**os.environ, "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == flags
