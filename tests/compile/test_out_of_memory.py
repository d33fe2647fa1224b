"""Out-of-memory reports, from RESOURCE_EXHAUSTED errors of the TPU compiler itself."""

import json
import os
import re
import subprocess
import sys

import pytest

from dflash_aot.cache.environment import libtpu_version
from dflash_aot.compile.analysis.inspection import explain_out_of_memory
from dflash_aot.compile.pipeline.build_target import COMPILE_ONLY

# v5e has 16126 MiB. One array is far larger. The others leave no room for the program: 0.1 MB, since libtpu 0.0.52 with
# 1 MiB more, in which case the smallest array is refused too.
PROVOKE = """
import json
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from dflash_aot.cache.topology import TOPOLOGIES
from dflash_aot.compile.pipeline.build_target import describe_devices

place = SingleDeviceSharding(describe_devices(TOPOLOGIES["v5e:1x1"]).devices[0])
messages = []
for count in (20 * 1024 * 16, 16126 * 16 - 1, 16126 * 16 - 17):
    array = jax.ShapeDtypeStruct((count, 16, 1024), jnp.float32, sharding=place)
    program = jax.jit(lambda x: x + 1, donate_argnums=0).trace(array).lower(lowering_platforms=("tpu",))
    try:
        program.compile()
    except RuntimeError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


@pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")
def test_compiler_error_becomes_a_sentence_with_figures():
    environment = {**os.environ, **COMPILE_ONLY}
    done = subprocess.run([sys.executable, "-c", PROVOKE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    early, *_, late = (explain_out_of_memory(RuntimeError(message)) for message in json.loads(done.stdout))
    # 20 GiB against 15.75 GiB, as the compiler rounds them
    assert early == "needs 21.47 GB of device memory, 4.56 GB more than there is"
    # Less than the program's own 100 kB is missing: with 64 kB less, the array would fit.
    assert re.match(r"needs 16.91 GB of device memory, 0.0\d MB more than there is; the largest buffers: ", late)
    assert re.search(r"f32\[25\d+,16,1024\] 16.91 GB", late) and "overlays 0.1" in late


def test_error_without_figures_keeps_its_first_line():
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes.\nMore lines")
    assert explain_out_of_memory(error) == f"needs more device memory than there is: {str(error).splitlines()[0]}"


def test_other_errors_are_not_explained():
    assert explain_out_of_memory(RuntimeError("INVALID_ARGUMENT: HBM")) is None
