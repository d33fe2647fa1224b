"""Attached devices and their environment, as JAX reports them."""

import os
import subprocess
import sys

import jax
import msgspec
import pytest

from dflash_aot.cache.devices import attached_devices, read_environment
from dflash_aot.cache.environment import Environment, is_tpu_attached


def test_read_environment_agrees_with_jax():
    here = read_environment("cpu")
    assert (here.jax, here.platform, here.device_kind) == (jax.__version__, "cpu", jax.devices("cpu")[0].device_kind)
    assert here.cpu_features == tuple(sorted(set(here.cpu_features)))
    assert (here.topology, here.device_count, here.coordinates, here.libtpu) == ("", 1, ("0",), "")
    assert here == msgspec.json.decode(msgspec.json.encode(here), type=Environment)


def test_too_few_devices_raise_with_the_flag_for_more():
    there = len(jax.devices("cpu"))
    with pytest.raises(
        RuntimeError, match=f"{there} are attached. XLA_FLAGS=--xla_force_host_platform_device_count=4096"
    ):
        attached_devices("cpu", 4096)


@pytest.mark.skipif(is_tpu_attached(), reason="a TPU is attached")
def test_missing_tpu_raises_without_asking_libtpu():
    with pytest.raises(RuntimeError, match="no TPU is attached"):
        read_environment("tpu")


def test_xla_flags_are_recorded_without_the_device_count():
    report = """
from dflash_aot.cache.devices import read_environment
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
