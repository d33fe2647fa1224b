"""All programs of a checkpoint pair: the bodies of the catalogue's programs, and what a build asks of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from dflash_aot.cache.arrays import (
    ArraySpec,
    PairShapes,
    arrays_by_name,
    derive_pair_shapes,
    state_arrays,
)
from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.chips import Chip
from dflash_aot.cache.environment import Environment, jaxlib_version
from dflash_aot.cache.errors import BuildFailed, CorruptBundle
from dflash_aot.cache.grid import Bucket, Grid
from dflash_aot.cache.key import (
    REORDER_SUMS,
    CompilerOptions,
    choose_compiler_options,
    executable_key,
)
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.sampling_state import check_sampling_kinds
from dflash_aot.cache.signature import PROGRAMS, ProgramWeights, Signature, list_signatures
from dflash_aot.cache.weight_recipe import PLAIN, MaskedMap, WeightFormats, WeightRecipe
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.dflash import DFlash
from dflash_aot.compile.models.layers import LayerForm
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.compile.models.tensor_parallel import ONE_DEVICE, TensorParallel, check_divisible
from dflash_aot.compile.programs import draft, mixed, prefill, rounds, slots, verify
from dflash_aot.compile.programs.costs import PairCosts, RooflineCost, sum_costs
from dflash_aot.compile.programs.draft import count_draft_cost, count_kv_write_cost
from dflash_aot.compile.programs.lowering import check_program, export_program
from dflash_aot.compile.programs.program import (
    Arrays,
    BuildEstimate,
    ModeFigures,
    Outputs,
    PairModels,
    ProgramBody,
)
from dflash_aot.compile.programs.verify import count_verify_cost

# The compile half of each program by its names.
BODIES: Mapping[str, ProgramBody] = {
    name: body
    for body in (
        prefill.BODY,
        prefill.PACKED_BODY,
        draft.DRAFT_BODY,
        verify.BODY,
        draft.KV_WRITE_BODY,
        rounds.BODY,
        mixed.BODY,
        slots.MOVE_BODY,
        slots.ADMIT_BODY,
        *slots.COPY_BODIES,
    )
    for name in body.program.names.values()
}
# Parameters of each draft layer that make the context keys and values.
CONTEXT_PARAMETERS = (
    "self_attn.kv",
    "self_attn.kv_scale",
    "self_attn.kv_bias",
    "self_attn.k_norm.weight",
)


class Programs:
    """All programs of a checkpoint pair: their signatures, the weights that they take, and their functions.

    Attributes:
        pair: the shapes of both models, from which the signatures follow.
        tp: the devices that share heads, MLPs and vocabulary, and the operations of each.
        formats: of the models' linear layers.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft,
        dtype: str,
        tp: TensorParallel = ONE_DEVICE,
        sampling: Sequence[str] = ("greedy",),
        formats: WeightFormats = PLAIN,
    ):
        """Describes both models; nothing is allocated.

        Args:
            target: facts of the target.
            draft: facts of the draft.
            dtype: of activations, plain weights and kv arrays.
            tp: the devices that share heads, MLPs and vocabulary, and the operations of each.
            sampling: what is built, of "greedy", "sample", "constrain" and "prompt_logprobs".
            formats: of the models' linear layers.

        Raises BadInput if a size cannot be shared evenly, or a kind of verification is unknown.
        """
        check_divisible(target, draft, tp.count)
        target_form = LayerForm(dtype, formats.target, tp)
        draft_form = LayerForm(dtype, formats.draft, tp)
        # a head that is not pruned may be the target's
        head = draft_form if draft.pruned else target_form
        kinds = check_sampling_kinds(sampling, "sampling")
        self._models = PairModels(
            target=AbstractModel(lambda: CausalLM(target, target_form)),
            draft=AbstractModel(lambda: DFlash(draft, draft_form, head)),
            facts=draft,
            shapes=derive_pair_shapes(target, draft, dtype, kinds, tp.count),
            tp=tp,
        )
        self.tp = tp
        self.formats = formats

    @property
    def pair(self) -> PairShapes:
        return self._models.shapes

    def recipes(self) -> tuple[WeightRecipe, ...]:
        """How the runtime makes every weight argument from checkpoint tensors."""
        own = (self._with_fallback(recipe) for recipe in self._models.draft.recipes("draft"))
        return (*self._models.target.recipes("target"), *own)

    def _with_fallback(self, recipe: WeightRecipe) -> WeightRecipe:
        """A draft's recipe with its fallback and its check.

        Checkpoints of speculators 0.9.0 leave out an embedding or head that equals the target's: the target's tensor
        is the fallback. The vocabulary map `d2t` is checked against the mask `t2d`.
        """
        facts = self._models.facts
        fallbacks = {"draft.embed_tokens.weight": "target.model.embed_tokens.weight"}
        if not facts.pruned:
            has_head = hasattr(self._models.target.module, "lm_head")
            head = "lm_head" if has_head else "model.embed_tokens"
            fallbacks |= {
                f"draft.lm_head.{part}": f"target.{head}.{part}"
                for part in ("weight", "weight_scale")
            }
        mapped = MaskedMap("t2d", facts.decoder.vocab) if recipe.name == "draft.d2t" else None
        return msgspec.structs.replace(recipe, otherwise=fallbacks.get(recipe.name), mapped=mapped)

    def arrays_by_name(self, grid: Grid) -> dict[str, ArraySpec]:
        """State and weights by name: the arrays to which signatures refer."""
        return arrays_by_name(state_arrays(self.pair, grid), self.recipes())

    def weights(self) -> ProgramWeights:
        """The weights of each program, by name."""
        target = tuple(f"target.{name}" for name in self._models.target.shapes())
        draft = tuple(f"draft.{name}" for name in self._models.draft.shapes())
        ends = tuple(name for name in target if "embed_tokens" in name or "lm_head" in name)
        borrowed = ends if self._models.facts.heads.vocab is None else ()
        projection = tuple(
            name for name in draft if name.startswith(("draft.fc.", "draft.hidden_norm."))
        )
        elsewhere = (*projection, "draft.confidence_head.")  # of kv_write, and of no program
        context = tuple(name for name in draft if name.endswith(CONTEXT_PARAMETERS))
        return ProgramWeights(
            target=target,
            draft=(*borrowed, *(name for name in draft if not name.startswith(elsewhere))),
            context=(*projection, *context),
        )

    def list_signatures(self, grid: Grid) -> list[Signature]:
        """The signatures of all executables of a grid."""
        return list_signatures(self.pair, grid, self.weights())

    def collectives(self, signature: Signature) -> int:
        """How many collectives the program needs; an executable with more was partitioned badly."""
        if self._models.tp.count == 1:
            return 0
        return BODIES[signature.program].count_collectives(self._models, signature)

    def function(self, signature: Signature) -> Callable[[Arrays], Outputs]:
        """The function of a program: inputs by name → donated state and results by name."""
        return partial(BODIES[signature.program].function, self._models, signature)


# -- figures of programs

MAX_COUNTED_TOKENS = 512  # tokens; wider calls are loops, which take no longer to compile


def find_figures(signature: Signature) -> ModeFigures:
    """The figures of a program in its mode."""
    _, mode = PROGRAMS[signature.program]
    return BODIES[signature.program].figures[mode]


def count_call_tokens(signature: Signature, pair: PairShapes) -> int:
    """How many tokens a call computes."""
    return BODIES[signature.program].count_tokens(signature, pair.block)


def estimate_build(
    signatures: Iterable[Signature], pair: PairShapes, platform: str
) -> BuildEstimate | None:
    """The estimate of a whole build; None for a platform without measured builds."""
    if platform not in ("tpu", "cpu"):
        return None
    total = BuildEstimate(0.0, 0.0)
    for signature in signatures:
        figures = find_figures(signature)
        measured = figures.tpu if platform == "tpu" else figures.cpu
        total += measured.estimate(_count_units(signature, pair, platform))
    return total


def _count_units(signature: Signature, pair: PairShapes, platform: str) -> int:
    """Tokens of a call on TPU, layers of a model elsewhere."""
    if platform == "tpu":
        return min(count_call_tokens(signature, pair), MAX_COUNTED_TOKENS)
    if BODIES[signature.program].layers_of == "draft":
        return pair.draft_kv.layers
    return sum(cache.layers for cache in pair.target_caches)


# -- roofline: the bounds of calls and of rounds


class RoundBound(msgspec.Struct, frozen=True):
    """The least seconds of one round, by executable. A round without speculation has no draft.

    Attributes:
        draft: seconds.
        verify: seconds.
        kv_write: seconds.
        exchange: the part of these in which devices sum arrays.
    """

    draft: float
    verify: float
    kv_write: float
    exchange: float = 0.0

    @property
    def round(self) -> float:
        """Seconds of the whole round."""
        return self.draft + self.verify + self.kv_write


class Roofline:
    """Costs of a pair's executables for one grid, shared evenly by `devices`. Buckets are taken to be full."""

    def __init__(
        self,
        target: Target,
        draft: Draft,
        dtype: str,
        grid: Grid,
        devices: int = 1,
        formats: WeightFormats = PLAIN,
    ):
        rings = derive_pair_shapes(target, draft, dtype, (), devices).rings
        ring = rings.count_pages(grid) * grid.page if rings else 0
        self._costs = PairCosts(target, draft, dtype, devices, formats, ring)
        self._devices = devices
        self._grid = grid

    def cost(self, signature: Signature) -> RooflineCost:
        """The cost of the executable with this signature."""
        return BODIES[signature.program].cost(self._costs, signature)

    def bound_round(self, bucket: Bucket, chip: Chip) -> RoundBound:
        """The bound of a greedy round. If the grid has drafts, K = 0 has a kv_write, at most as often."""
        B = bucket.batch
        S = bucket.length
        K = bucket.k
        drafts = self._grid.k[-1] > 0
        nothing = RooflineCost(0.0, 0.0)
        costs = (
            count_draft_cost(self._costs, B, S, K) if K else nothing,
            count_verify_cost(self._costs, B, S, K, "greedy"),
            count_kv_write_cost(self._costs, B, K + 1) if drafts else nothing,
        )
        drafted, verified, written = [cost.bound_seconds(chip, self._devices) for cost in costs]
        exchanged = sum_costs(costs).exchange_seconds(chip, self._devices)
        return RoundBound(drafted, verified, written, exchanged)


class ProgramSource(Protocol):
    """What a build compiles: the signatures of a grid, and the program of each as portable StableHLO.

    Attributes:
        signatures: one per executable.
        state: the device state that the programs share.
        recipes: how the runtime makes the weights.
        known: state and weights by name, to which the signatures refer.
        reorders_sums: whether a CPU may sum products in any order.
    """

    reorders_sums: bool

    @property
    def signatures(self) -> Sequence[Signature]: ...

    @property
    def state(self) -> tuple[ArraySpec, ...]: ...

    @property
    def recipes(self) -> tuple[WeightRecipe, ...]: ...

    @property
    def known(self) -> Mapping[str, ArraySpec]: ...

    def export(self, signature: Signature) -> bytes:
        """The program of a signature as portable StableHLO."""
        ...


def choose_options(
    source: ProgramSource, signature: Signature, environment: Environment
) -> CompilerOptions:
    """The options with which a program of the source is compiled."""
    dtypes = {source.known[name].dtype for name in signature.weights}
    return choose_compiler_options(
        environment, signature.program, dtypes if source.reorders_sums else ()
    )


class TracedPrograms:
    """The programs of a pair for a grid, traced."""

    reorders_sums = True

    def __init__(self, programs: Programs, grid: Grid):
        self.signatures = programs.list_signatures(grid)
        self.known = programs.arrays_by_name(grid)
        self.state = state_arrays(programs.pair, grid)
        self.recipes = programs.recipes()
        self._programs = programs

    def export(self, signature: Signature) -> bytes:
        """Traces the program and lowers it to StableHLO."""
        function = self._programs.function(signature)
        programs = self._programs
        return export_program(
            signature, function, self.known, programs.tp.backend, programs.tp.count
        )


class BundledPrograms:
    """The programs of a bundle, for a rebuild that needs no checkpoints.

    Attributes:
        manifest: the bundle's.
        store: the bundle's.
    """

    def __init__(self, manifest: Manifest, store: Store):
        self.signatures = [entry.signature for entry in manifest.entries]
        self.state = manifest.state
        self.recipes = manifest.weights
        self.known = manifest.arrays_by_name()
        self.reorders_sums = any(
            entry.compiler_options.items() >= REORDER_SUMS.items() for entry in manifest.entries
        )
        self._entries = {entry.signature.label: entry for entry in manifest.entries}
        self.manifest = manifest
        self.store = store

    def check_readable(self) -> None:
        """Raises BuildFailed if the installed JAX cannot read the first program; the others are of the same version."""
        entry = self.manifest.entries[0]
        try:
            check_program(self.store.read_program(entry))
        except CorruptBundle:
            return  # the build reports damaged files one by one
        except BuildFailed as error:
            raise BuildFailed(
                f"{self.store.bundle}: JAX {jaxlib_version()} does not read the programs ({error}). The bundle was "
                f"built with JAX {self.manifest.environment.jaxlib}. To export them anew, which needs only both "
                f"config.json: {self.manifest.build_command(self.store.bundle)}"
            ) from error

    def export(self, signature: Signature) -> bytes:
        """Reads the program. Raises CorruptBundle if it is damaged, or its key is not the one in the manifest."""
        entry = self._entries[signature.label]
        remedy = self.manifest.build_command(self.store.bundle)
        try:
            program = self.store.read_program(entry)
        except CorruptBundle as error:
            raise CorruptBundle(f"{error}: {remedy}") from error
        if (
            found := executable_key(
                program, signature, self.manifest.environment, entry.compiler_options
            )
        ) != entry.key:
            raise CorruptBundle(
                f"its key is {found}, but the manifest promises {entry.key}: signature, environment or program differ "
                f"from those that were compiled. Build it again from its checkpoints: {remedy}"
            )
        return program
