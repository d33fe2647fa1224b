"""Fixtures: models with weights, loaded in the plainest way, and their programs on arrays by name."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec import UNSET

from dflash_aot.cache.arrays import state_arrays
from dflash_aot.cache.devices import read_environment
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.grid import Grid, parse_grid
from dflash_aot.cache.model_config.architecture import AttentionShape, Decoder, DenseMlp, Draft, SlidingWindow, Target
from dflash_aot.cache.model_config.config_file import ConfigFile, read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.sampling_state import NEUTRAL_SAMPLING, SAMPLING_MODES
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.weight_recipe import WeightRecipe
from dflash_aot.compile.models.attention import attend, block_mask, context_mask
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.dflash import DFlash
from dflash_aot.compile.models.layers import AttentionInputs, LayerForm
from dflash_aot.compile.models.parameters import AbstractModel, Model
from dflash_aot.compile.programs.programs import Programs
from dflash_aot.runtime.weights.quantized_tensors import open_checkpoint
from tests.compile.quick import jit_quickly
from tests.runtime.conftest import make_up, smallest  # noqa: F401  fixtures

CONFIGS = Path(__file__).parents[1] / "cache" / "configs"
Arrays = dict[str, jax.Array]
UNASKED = {"sampled": [False], "penalised": [False]}  # arguments that a call may leave out
WIDTH = 208  # the longest golden sequence and a block after it; padding does not change a causal model


def assemble(recipe: WeightRecipe, tensors: Mapping[str, np.ndarray]) -> jax.Array:
    """One weight argument, tensor by tensor. Elements that no tensor fills stay NaN, or an invalid token."""
    array = np.full(recipe.shape, 1 << 30 if recipe.dtype == "int32" else np.nan, recipe.dtype)
    for placement in recipe.placements:
        assert tensors[placement.tensor].shape == placement.stored, placement
        stored = tensors[placement.tensor]
        stored = stored if placement.rows is UNSET else stored[slice(*placement.rows)]
        part = tuple(slice(o, o + e) for o, e in zip(placement.offset, placement.extent, strict=True))
        array[part] = stored.reshape(placement.extent)
    return jnp.asarray(array)


def target_parameters(target: Target) -> AbstractModel[CausalLM]:
    return AbstractModel(lambda: CausalLM(target, LayerForm("float32")))


def draft_parameters(draft: Draft) -> AbstractModel[DFlash]:
    return AbstractModel(lambda: DFlash(draft, LayerForm("float32")))


def bind(role: str, parameters: AbstractModel[Model], weights: Arrays) -> Model:
    return parameters.bind({name: weights[f"{role}.{name}"] for name in parameters.shapes()})


def load_weights(recipes: Iterable[WeightRecipe], directory: Path) -> Arrays:
    recipes = list(recipes)
    tensors = load_tensors(directory, any(recipe.interleaved for recipe in recipes))
    return {recipe.name: assemble(recipe, tensors) for recipe in recipes}


def load_tensors(directory: Path, interleaved: bool = False) -> dict[str, np.ndarray]:
    tensors = open_checkpoint(directory, "target", interleaved)
    return {name: tensors.read(name, tensors.shape(name), (tensors.dtype(name),)) for name in tensors.names()}


@partial(jit_quickly, static_argnames="target_layer_ids")
def run_target(model: CausalLM, ids: jax.Array, target_layer_ids: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """ids [B, T] → logits [B, T, V] and features [B, T, A·H], A the number of aux layers."""
    positions = jnp.arange(ids.shape[1])[None]

    def attend_causally(kv: None, layer: int, inputs: AttentionInputs) -> tuple[jax.Array, None]:
        mask = block_mask(inputs.windows[layer], positions)
        return attend(inputs.queries, (inputs.keys, inputs.values, mask), sinks=inputs.sinks), kv

    x, features, _ = model.forward(ids, positions, target_layer_ids, None, attend_causally)
    return model.logits(x), features


@jit_quickly
def run_draft(model: DFlash, x: jax.Array, features: jax.Array, length: jax.Array) -> jax.Array:
    positions, context_positions = length + jnp.arange(x.shape[1])[None], jnp.arange(features.shape[1])[None]
    context = model.write_context(features, context_positions, lambda kv, layer, k, v: [*kv, (k, v)], [])

    def attend_both(layer: int, inputs: AttentionInputs) -> jax.Array:
        window = inputs.windows[layer]
        written = (context_positions < length)[:, None]
        past = written & context_mask(window, positions, context_positions)
        own = inputs.keys, inputs.values, block_mask(window, positions)
        return attend(inputs.queries, (*context[layer], past), own)

    return model.block_hidden(x, positions, attend_both)


@dataclass(frozen=True)
class TargetModel:
    """A target and its weights. Every output is computed from all tokens, without kv cache, bucket or state."""

    target: Target
    weights: Arrays

    @cached_property
    def causal_lm(self) -> CausalLM:
        return bind("target", target_parameters(self.target), self.weights)

    def read(self, tokens: Iterable[int], target_layer_ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """T tokens → logits [T, V] and features [T, A·H]. Equal calls are computed once."""
        return self._read(tuple(map(int, tokens)), target_layer_ids)

    @cached_property
    def _read(self) -> Callable[[Sequence[int], tuple[int, ...]], tuple[np.ndarray, np.ndarray]]:
        return cache(self._read_anew)

    def _read_anew(self, tokens: Sequence[int], target_layer_ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        ids = np.zeros((1, WIDTH), np.int32)
        ids[0, : len(tokens)] = tokens
        logits, features = run_target(self.causal_lm, ids, target_layer_ids)
        return np.asarray(logits)[0, : len(tokens)], np.asarray(features)[0, : len(tokens)]

    def paired(self, draft: Draft, weights: Mapping[str, jax.Array] | None = None) -> "Models":
        """The pair with a draft. The draft needs no weights if nothing reads them."""
        return Models(self.target, {**self.weights, **(weights or {})}, draft)


@dataclass(frozen=True)
class Models(TargetModel):
    draft: Draft

    @cached_property
    def programs(self) -> Programs:
        return Programs(self.target, self.draft, "float32", sampling=SAMPLING_MODES)

    @cached_property
    def dflash(self) -> DFlash:
        return bind("draft", draft_parameters(self.draft), self.weights)

    def features(self, tokens: Iterable[int]) -> np.ndarray:
        return self.read(tokens, self.draft.target_layer_ids)[1]

    def draft_hidden(self, features: np.ndarray, anchor: int) -> np.ndarray:
        """Features [T, A·H] of all committed tokens, and the anchor → hidden states [block, H]."""
        padded = np.zeros((1, WIDTH, features.shape[1]), np.float32)
        padded[0, : len(features)] = features
        ids = np.array([anchor, *[self.draft.mask_token] * (self.draft.block - 1)])
        x = self.dflash.embed(ids, self.causal_lm)[None]
        return np.asarray(run_draft(self.dflash, x, padded, jnp.int32(len(features))))[0]

    def draft_candidates(self, features: np.ndarray, anchor: int) -> tuple[np.ndarray, np.ndarray]:
        """As `draft_hidden` → the candidates [block - 1, C] of a DFlash2 draft, and their scores [block - 1, C, C]."""
        hidden = self.draft_hidden(features, anchor)[None]
        tokens, scores = self.dflash.score_candidates(hidden, jnp.asarray([anchor]), self.causal_lm, self.draft.max_k)
        return np.asarray(tokens)[0], np.asarray(scores)[0]

    def draft_logits(self, features: np.ndarray, anchor: int) -> np.ndarray:
        """As `draft_hidden` → logits of the drafted tokens [max_k, V], V the draft's vocabulary."""
        return np.asarray(self.dflash.logits(self.draft_hidden(features, anchor)[-self.draft.max_k :], self.causal_lm))


def read_published(*names: str, **changes: object) -> tuple[Target, Draft]:
    """The facts of a published target and draft; `changes` are those of the draft's config."""
    values = [json.loads((CONFIGS / f"{name}.json").read_text()) for name in names]
    target = read_target(ConfigFile(CONFIGS, values[0]))
    return target, read_draft(ConfigFile(CONFIGS, {**values[1], **changes}), target)


def read_slots(arrays: Mapping[str, jax.Array], name: str, grid: Grid) -> np.ndarray:
    pages = np.asarray(arrays[name])[:, np.array(grid.separate_tables(range(grid.slots)))]
    layers, slots, count, heads, page, width = pages.shape
    return pages.swapaxes(2, 3).reshape(layers, slots, heads, count * page, width)


class Rig:
    """The programs of a pair on arrays by name. Each is compiled once, and nothing is donated."""

    def __init__(self, models: Models, grid: Grid):
        self._models, self.grid = models, grid
        self._state = {array.name: array for array in state_arrays(models.programs.pair, grid)}
        self._signatures = {signature.label: signature for signature in models.programs.list_signatures(grid)}
        self._jitted = cache(lambda label: jit_quickly(models.programs.function(self._signatures[label])))

    def empty(self) -> Arrays:
        """The state before any request. Its values must not matter, so they are not zero."""
        return {array.name: jnp.full(array.shape, 3, array.dtype) for array in self._state.values()}

    def run(self, label: str, arrays: Mapping[str, jax.Array], **arguments: object) -> Arrays:
        """Runs a program on its inputs among `arrays` and `arguments`: `arrays`, arguments and outputs by name."""
        signature = self._signatures[label]
        if "pages" not in arguments and (slots := self._find_slots(signature, arguments)) is not None:
            arguments["pages"] = self.grid.separate_tables(slots)
        state = {name: arrays[name] for name in signature.state}
        weights = {name: self._models.weights[name] for name in signature.weights}
        given = {
            array.name: jnp.asarray(
                arguments.pop(array.name, arrays.get(array.name, UNASKED.get(array.name))), array.dtype
            )
            for array in signature.arguments
        }
        assert not arguments, f"{label} takes no {sorted(arguments)}"
        left = {name: array for name, array in given.items() if name not in self._state}  # `counts` is both
        return {**arrays, **left, **self._jitted(label)({**weights, **state, **given})}

    def _find_slots(self, signature: Signature, arguments: dict[str, object]) -> object:
        """The slots whose pages a call takes; None where it takes none, or those of the call before it."""
        if signature.program == "kv_write":
            return arguments.pop("slots", None)
        rows = [one.shape[0] for one in signature.arguments if one.name == "pages"]
        return arguments.get("slots", range(*rows)) if rows else None

    def admit(self, arrays: Mapping[str, jax.Array], slot: int, prompt: Sequence[int], **given: object) -> Arrays:
        """Admits a sampled request. `given`: sampling parameters by name, and arguments of the program."""
        columns = {name: given.pop(name, value) for name, value in NEUTRAL_SAMPLING.items()}
        tokens = np.arange(arrays["bias"].shape[1])
        nothing = {"slot_bias": 0 * tokens[None], "slot_counts": 0 * tokens[None], "slot_tops": [0]}
        sampling = {"slot_sampling": [list(columns.values())], "slot_prompted": np.isin(tokens, prompt)[None]}
        at = {"starts": [len(prompt) - 1], "anchor": [prompt[-1]]}
        return self.run("admit", arrays, slots=[slot], **{**nothing, **sampling, **at, **given})

    def prefill(
        self, arrays: Mapping[str, jax.Array], slot: int, tokens: list[int], width: int, padding: int = 0
    ) -> Arrays:
        """Prefills all chunks of one prompt, each with its kv_write."""
        length = self.grid.capacity
        for at in range(0, len(tokens), width):
            chunk = tokens[at : at + width]
            arrays = self.run(
                f"prefill prefill={width} length={length}",
                arrays,
                tokens=[chunk + [padding] * (width - len(chunk))],
                slots=[slot],
                starts=[at],
                counts=[len(chunk)],
                gives_first=[at + width >= len(tokens)],
            )
            arrays = self.run(f"kv_write rows=1 width={width}", arrays)
        return dict(arrays)


@pytest.fixture(scope="session")
def load_target():
    """A checkpoint directory → TargetModel."""

    @cache
    def load(directory: Path) -> TargetModel:
        target = read_target(read_config(directory))
        return TargetModel(target, load_weights(target_parameters(target).recipes("target"), directory))

    return load


@pytest.fixture(scope="session")
def load_models(load_target):
    """Two checkpoint directories → Models."""

    @cache
    def load(target_directory: Path, draft_directory: Path) -> Models:
        alone = load_target(target_directory)
        draft = read_draft(read_config(draft_directory), alone.target)
        tensors = load_tensors(draft_directory)
        own = [recipe for recipe in alone.paired(draft).programs.recipes() if recipe.checkpoint == "draft"]
        shared = [recipe for recipe in own if recipe.otherwise and recipe.placements[0].tensor not in tensors]
        weights = {recipe.name: assemble(recipe, tensors) for recipe in own if recipe not in shared}
        return alone.paired(draft, weights | {recipe.name: alone.weights[recipe.otherwise] for recipe in shared})

    return load


READINGS = ["tied", "untied", "swa", "anchored_noncausal", "llama3rope", "pruned", "gpt_oss", "gemma_text", "softcap"]
READINGS += ["dflash2", "dflash2_sliding"]


@pytest.fixture(params=READINGS, scope="session")
def reading(request, runs):
    """Golden pairs that compute differently; test_golden_runs.py runs all of them."""
    return runs[request.param]


@pytest.fixture(scope="session")
def small_pair() -> tuple[Target, Draft]:
    """A very small pair, with one sliding layer."""

    attention = AttentionShape(heads=4, kv_heads=2, head_dim=8)
    decoder = Decoder(2, 24, DenseMlp(40), attention, Rope(10_000.0, 8), 1e-6, vocab=48, positions=64)
    windows = SlidingWindow(6, causal=True), None
    draft = Draft(decoder, block=4, mask_token=47, target_layer_ids=(0,), target_hidden=24, windows=windows)
    return Target(decoder, tied=False), draft


@pytest.fixture(scope="session")
def small(small_pair) -> Models:
    rng = np.random.default_rng(7)

    def fill(recipe: WeightRecipe) -> jax.Array:
        noise = rng.standard_normal(recipe.shape, np.float32)
        return jnp.asarray(1 + noise / 4 if "norm" in recipe.name else noise / 2)

    target, draft = small_pair
    recipes = Programs(target, draft, "float32").recipes()
    return Models(target, {recipe.name: fill(recipe) for recipe in recipes}, draft)


@pytest.fixture(scope="session")
def make_rig():
    return lambda models, buckets: Rig(models, parse_grid(buckets, models.draft.verified_block))


@pytest.fixture(scope="session")
def rig(small, make_rig) -> Rig:
    return make_rig(small, "batch=1,2,3 length=16,32 k=0,1,3 prefill=4,16 rounds=4 page=5")


@pytest.fixture(scope="session")
def environment() -> Environment:
    return read_environment("cpu")
