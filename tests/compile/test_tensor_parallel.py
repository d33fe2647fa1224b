"""Tensor parallelism: four devices compute what one device computes; a pair that they cannot share is refused."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from msgspec import structs

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import DenseMlp, DraftHeads, MixtureOfExperts
from dflash_aot.compile.models.tensor_parallel import TensorParallel, check_divisible
from dflash_aot.compile.programs.programs import Programs

DEVICES = 4
# Run in a process of its own: the number of CPU devices is set before JAX starts.
COMPARE_DEVICES = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from dflash_aot.cache.devices import make_mesh
from dflash_aot.cache.arrays import MESH_AXIS
from dflash_aot.compile.models.backend import CPU, TPU
from dflash_aot.compile.models.tensor_parallel import ONE_DEVICE, TensorParallel

devices = jax.devices()
tp = TensorParallel(len(devices))

def both(method, arguments, split, **more):
    def run(tp):
        return lambda *arrays: getattr(tp, method)(*arrays, **more)
    specs = tuple(P() if at is None else P(*[None] * at, MESH_AXIS) for at in split)
    out = P(None, MESH_AXIS) if method == "own_slice" else P()
    together = jax.shard_map(run(tp), mesh=make_mesh(devices), in_specs=specs, out_specs=out, check_vma=False)
    found = [jax.jit(one)(*arguments) for one in (run(ONE_DEVICE), together)]
    return jax.tree.map(lambda array: np.asarray(array).tolist(), found)

rng = np.random.default_rng(0)
logits = rng.integers(0, 3, (50, 8)).astype(np.float32)  # ties within a device and across them
logits[0], logits[1], logits[2, 5] = 0, -np.inf, np.nan
weight = rng.integers(-2, 3, (4 * 2304, 8)).astype(np.float32)
x = rng.integers(-2, 3, (2, 5, 8)).astype(np.float32)

def search(find, tp):
    def run(weight, x):
        return tp.merge(find.search_outputs(weight, x[:, 1:4], None, 8), weight.shape[0], 8)
    shares = dict(in_specs=(P(MESH_AXIS), P()), out_specs=P(), check_vma=False)
    run = run if tp.count == 1 else jax.shard_map(run, mesh=make_mesh(devices), **shares)
    return jax.tree.map(lambda array: np.asarray(array).tolist(), jax.jit(run)(weight, x))

matrices = [rng.integers(-3, 4, (rows, 8)) * 1.0 for rows in (5, 2)]
print(json.dumps({
    "argmax": both("argmax", [logits], [1]),
    "look_up": both("look_up", [rng.standard_normal((8, 3), np.float32), np.arange(8)[None]], [0, None]),
    "own_slice": both("own_slice", [rng.standard_normal((2, 8), np.float32)], [None]),
    "row_parallel_matmul": both("row_parallel_matmul", matrices, [1, 1]),
    "logsumexp_and_logits": both("logsumexp_and_logits", [logits[3:], rng.integers(0, 8, 47)], [1, None]),
    "top_values": both("top_values", [logits[3:]], [1], count=6),
    "top_outputs": both(
        "top_outputs",
        [rng.integers(-2, 3, (48, 8)).astype(np.float32), rng.integers(-2, 3, (2, 3, 8)).astype(np.float32)],
        [0, None], scale=None, count=15,
    ),
    "searches": [search(find, one) for find in (CPU, TPU) for one in (ONE_DEVICE, tp)],
    "products": (x[:, 1:4] @ weight.T).tolist(),
}))
"""


@pytest.fixture(scope="module")
def together():
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", COMPARE_DEVICES], env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


def test_several_devices_compute_what_one_device_computes(together):
    for method in ["argmax", "look_up", "own_slice", "row_parallel_matmul", "top_outputs", "top_values"]:
        alone, shared = together[method]
        assert alone == shared


def test_both_searches_find_the_same_outputs_on_several_devices(together):
    products = np.array(together["products"])
    tokens = np.argsort(-products, axis=-1, kind="stable")[..., :8]
    values = np.take_along_axis(products, tokens, axis=-1)
    assert (values[..., 0] == values[..., 1]).any() and (values[..., 7] == np.sort(products)[..., -9]).any()  # ties
    assert together["searches"] == [[values.tolist(), tokens.tolist()]] * 4


def test_several_devices_compute_the_logsumexp_of_one_device(together):
    (total, logits), (shared_total, shared_logits) = together["logsumexp_and_logits"]
    np.testing.assert_allclose(shared_total, total, rtol=1e-6)
    assert shared_logits == logits


def test_sizes_that_the_devices_do_not_divide_are_refused_by_name(small_pair):
    words = "8 devices cannot share the target's query heads 4, the draft's query heads 4 evenly; 1, 2, 4 can "
    with pytest.raises(BadInput, match=f"^{words}"):
        Programs(*small_pair, "float32", TensorParallel(8))
    for change, named in [
        ({"mlp": DenseMlp(42)}, "the target's MLP width 42"),
        ({"mlp": MixtureOfExperts(4, 2, 18, True)}, "the target's MLP width 18"),
        ({"vocab": 50}, "the vocabulary 50"),
    ]:
        even, draft = small_pair
        check_divisible(even, draft, 4)
        with pytest.raises(BadInput, match=f"^4 devices cannot share {named} evenly; 1, 2 can "):
            check_divisible(structs.replace(even, decoder=structs.replace(even.decoder, **change)), draft, 4)
    with pytest.raises(BadInput, match="the draft's own vocabulary 47"):
        check_divisible(small_pair[0], structs.replace(small_pair[1], heads=DraftHeads(vocab=47)), 2)
