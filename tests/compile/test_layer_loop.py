"""A loop over stacked layers computes what unrolled layers compute, with few arguments."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec import structs

from dflash_aot.cache.model_config.architecture import (
    ClampedActivation,
    DenseMlp,
    GatedDeltaNet,
    MixtureOfExperts,
    SlidingWindow,
)
from dflash_aot.cache.sampling_state import SAMPLING_MODES
from dflash_aot.compile.models.backend import STACKED_CPU, TPU
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.programs.programs import Programs

GRID = "batch=2 length=16 k=3 prefill=4"
FIRST = {"gives_first": [True]}
CALLS = {
    "prefill prefill=4 length=16": {"tokens": [[5, 6, 7, 8]], "slots": [1], "starts": [3], "counts": [2], **FIRST},
    "verify batch=2 length=16 k=3": {"active": [True, False], "block": [[1, 2, 3, 4], [5, 6, 7, 8]]},
}
OF_THE_DRAFT = {"draft batch=2 length=16 k=3": {}, "kv_write rows=2 width=4": {"slots": [0, 1], "starts": [2, 5]}}


class Stacked:
    """Models with looped programs, whose weights are the stacked weights of the unrolled ones."""

    def __init__(self, models, backend=STACKED_CPU):
        self.programs = Programs(models.target, models.draft, "float32", TensorParallel(1, backend), SAMPLING_MODES)
        self.weights = {}
        hybrid = models.target.recurrent
        for recipe in self.programs.recipes():
            layers = range(recipe.shape[0] if "layers." in recipe.name else 0)
            if hybrid and recipe.name.startswith("target"):
                kind = hybrid.layers if "recurrent_layers" in recipe.name else models.target.attention_layers
                layers = [kind[rank] for rank in layers]
            name = recipe.name.replace("recurrent_layers.", "layers.")
            parts = [models.weights[name.replace(".layers.", f".layers.{layer}.")] for layer in layers]
            self.weights[recipe.name] = jnp.stack(parts) if parts else models.weights[recipe.name]
        self.draft = models.draft


def make_hybrid(target, recurrent_layers):
    """A small hybrid of six layers, of which these have a recurrent state."""
    attention = structs.replace(target.decoder.attention, gated=True)
    rope = structs.replace(target.decoder.rope, head_dim=4)
    decoder = structs.replace(target.decoder, layers=6, attention=attention, rope=rope, norm="unit_offset")
    sizes = GatedDeltaNet(2, 4, key_dim=4, value_dim=6, kernel=4, layers=recurrent_layers)
    return structs.replace(target, decoder=decoder, recurrent=sizes)


@pytest.fixture(params=["experts", "hybrid", "irregular hybrid"], scope="module")
def models(request, small):
    """The small pair, with gpt-oss's layers or hybrid. Its draft is dense, with a sliding and a full layer.

    A TPU lays out its MLPs by columns.
    """
    if request.param == "experts":
        experts = MixtureOfExperts(4, 2, width=16, normalized=True, clamped=ClampedActivation(1.0, 1.7))
        attention = structs.replace(small.target.decoder.attention, biased=True, sinks=True)
        decoder = structs.replace(small.target.decoder, mlp=experts, attention=attention)
        windows = SlidingWindow(5, causal=True), SlidingWindow(9, causal=True)
        target = structs.replace(small.target, decoder=decoder, windows=windows)
    else:
        target = make_hybrid(small.target, (0, 1, 3, 4) if request.param == "hybrid" else (0, 2, 3))
    rng = np.random.default_rng(3)
    draft = structs.replace(small.draft, decoder=structs.replace(small.draft.decoder, mlp=DenseMlp(128)))
    recipes = Programs(target, draft, "float32").recipes()
    weights = {one.name: jnp.asarray(rng.standard_normal(one.shape, np.float32) / 2) for one in recipes}
    return dataclasses.replace(small, target=target, draft=draft, weights=weights)


def test_stacked_layers_equal_unrolled_layers(models, make_rig):
    rigs = [make_rig(one, GRID) for one in (models, Stacked(models), Stacked(models, TPU))]
    rng = np.random.default_rng(1)
    state = {
        name: jnp.asarray(rng.standard_normal(array.shape), array.dtype) for name, array in rigs[0].empty().items()
    }
    state |= {"lengths": jnp.array([4, 9]), "anchors": jnp.array([11, 30])}
    features = rng.standard_normal((2, 4, 24))
    calls = CALLS if models.target.recurrent else CALLS | OF_THE_DRAFT
    for label, arguments in calls.items():
        given = {**arguments, "features": features} if label.startswith("kv_write") else arguments
        loops = rigs[1:] if label in OF_THE_DRAFT else rigs[1:2]
        unrolled, *looped = (rig.run(label, state, **given) for rig in (rigs[0], *loops))
        for name, array in unrolled.items():
            # In a loop XLA fuses otherwise, the many small operations of a delta rule most of all, and attention goes
            # over all pages at once.
            tolerance = {"rtol": 0, "atol": 1e-4} if models.target.recurrent else {"rtol": 2e-5, "atol": 2e-5}
            for loop in looped:
                np.testing.assert_allclose(array, loop[name], **tolerance, err_msg=f"{label}: {name}")
