"""What devices do together is what one does alone; and pairs that they cannot share are refused in words."""

import json
import os
import subprocess
import sys

import pytest
from msgspec import structs

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Attention, Dense, Experts
from dflash_aot.compile.models.tensor_parallel import check_shares
from dflash_aot.compile.programs.programs import Programs

DEVICES = 4
# A process of its own: how many devices a CPU is must be said before JAX starts.
TOGETHER = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from dflash_aot.cache.mesh import make_mesh
from dflash_aot.cache.signature import AXIS
from dflash_aot.compile.models.tensor_parallel import ALONE, Shards

devices = jax.devices()
shards = Shards(len(devices))

def both(method, arguments, split, **more):
    def run(shards):
        return lambda *arrays: getattr(shards, method)(*arrays, **more)
    specs = tuple(P() if at is None else P(*[None] * at, AXIS) for at in split)
    out = P(None, AXIS) if method == "share" else P()
    together = jax.shard_map(run(shards), mesh=make_mesh(devices), in_specs=specs, out_specs=out, check_vma=False)
    found = [jax.jit(one)(*arguments) for one in (run(ALONE), together)]
    return jax.tree.map(lambda array: np.asarray(array).tolist(), found)

rng = np.random.default_rng(0)
logits = rng.integers(0, 3, (50, 8)).astype(np.float32)  # ties within a device and across them
logits[0], logits[1], logits[2, 5] = 0, -np.inf, np.nan
print(json.dumps({
    "choose": both("choose", [logits], [1]),
    "look_up": both("look_up", [rng.standard_normal((8, 3), np.float32), np.arange(8)[None]], [0, None]),
    "share": both("share", [rng.standard_normal((2, 8), np.float32)], [None]),
    "multiply": both("multiply", [rng.integers(-3, 4, (5, 8)) * 1.0, rng.integers(-3, 4, (2, 8)) * 1.0], [1, 1]),
    "pick": both("pick", [logits[3:], rng.integers(0, 8, 47)], [1, None]),
    "largest": both("largest", [logits[3:]], [1], count=6),
}))
"""


@pytest.fixture(scope="module")
def together():
    """Per method, what one device makes of it and what several do."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", TOGETHER], env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("method", ["choose", "look_up", "share", "multiply", "pick", "largest"])
def test_several_devices_do_what_one_does(together, method):
    alone, shared = together[method]
    assert alone == shared


def test_what_cannot_be_shared_is_named(small_pair):
    with pytest.raises(BadInput) as refused:
        Programs(*small_pair, "float32", devices=4)
    assert str(refused.value) == (
        "4 devices cannot share the target's kv heads 2, the draft's kv heads 2 evenly; "
        "1, 2 can (--topology, --tensor_parallel)"
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mlp": Dense(42)}, "the target's MLP width 42"),
        ({"mlp": Experts(4, 2, 18, True)}, "the target's MLP width 18"),
        ({"vocab": 50}, "the vocabulary 50"),
    ],
)
def test_every_shared_size_counts(small_pair, change, named):
    target, draft = small_pair
    wide = {"attention": Attention(heads=8, kv_heads=8, head_dim=8)}
    draft = structs.replace(draft, decoder=structs.replace(draft.decoder, **wide))
    even = structs.replace(target, decoder=structs.replace(target.decoder, **wide))
    check_shares(even, draft, 4)
    with pytest.raises(BadInput, match=f"^4 devices cannot share {named} evenly; 1, 2 can "):
        check_shares(structs.replace(even, decoder=structs.replace(even.decoder, **change)), draft, 4)


def test_a_drafts_own_vocabulary_is_shared_too(small_pair):
    target, draft = small_pair
    with pytest.raises(BadInput, match="the draft's own vocabulary 47"):
        check_shares(target, structs.replace(draft, vocab=47), 2)
