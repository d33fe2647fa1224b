"""Whether what was built on one machine runs on another, field by field."""

import os
import subprocess
import sys

import jax
import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.environment import (
    Difference,
    Environment,
    attached_devices,
    differences,
    is_tpu_attached,
    read_environment,
)

PLAIN_FIELDS = [field for field in Environment.__struct_fields__ if field != "cpu_features"]


def test_a_machine_fits_itself(environment):
    assert differences(environment, environment) == []


@pytest.mark.parametrize("field", PLAIN_FIELDS)
def test_every_field_that_differs_is_named_with_both_values(environment, field):
    value = getattr(environment, field)
    other = {int: 7, str: "other", tuple: ("1", "0")}[type(value)]
    here = structs.replace(environment, **{field: other})
    told = [" ".join(one) if isinstance(one, tuple) else str(one) for one in (value, other)]
    assert differences(environment, here) == [Difference(field, *told)]


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
    assert (here.topology, here.device_count, here.coordinates, here.libtpu) == ("", 1, ("0",), "")
    assert here == msgspec.json.decode(msgspec.json.encode(here), type=Environment)


def test_an_accelerator_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="no_such_platform"):
        read_environment("no_such_platform")


def test_more_devices_than_there_are_is_an_error_with_a_remedy():
    there = len(jax.devices("cpu"))
    with pytest.raises(RuntimeError, match=f"here are {there}. XLA_FLAGS=--xla_force_host_platform_device_count=4096"):
        attached_devices("cpu", 4096)


@pytest.mark.skipif(is_tpu_attached(), reason="a TPU is attached")
def test_where_no_tpu_is_attached_nobody_asks_libtpu():
    with pytest.raises(RuntimeError, match="no TPU is attached"):
        read_environment("tpu")


@pytest.mark.parametrize(
    ("files", "vendors", "attached"),
    [
        (["accel0"], [], True),
        (["vfio/0"], ["0x8086", "0x1ae0"], True),
        (["vfio/0"], ["0x8086", "0x10de"], False),  # a GPU that is passed through
        (["vfio/vfio"], ["0x1ae0"], False),
        (["accel", "null"], ["0x1ae0"], False),
        ([], [], False),
    ],
)
def test_a_tpu_is_known_by_the_files_of_its_driver_and_its_vendor(tmp_path, files, vendors, attached):
    for file in files:
        (tmp_path / "dev" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / file).touch()
    for slot, vendor in enumerate(vendors):
        (tmp_path / "pci" / str(slot)).mkdir(parents=True)
        (tmp_path / "pci" / str(slot) / "vendor").write_text(f"{vendor}\n")
    assert is_tpu_attached(tmp_path / "dev", tmp_path / "pci") == attached


def test_compiler_flags_are_part_of_the_environment_and_the_number_of_devices_is_not_one_of_them():
    report = """
from dflash_aot.cache.environment import read_environment
four = read_environment("cpu", 4)
assert (four.device_count, four.coordinates) == (4, ("0", "1", "2", "3"))
print(four.xla_flags)
"""
    flags = "--xla_cpu_enable_fast_math=false"
    found = subprocess.run(
        [sys.executable, "-c", report],
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {flags}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == flags
