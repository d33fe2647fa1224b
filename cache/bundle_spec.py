"""Bundle spec: what a bundle is built for. Writes flags, tells the differences of two specs, and merges two specs."""

import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.cache.chips import TOPOLOGIES
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.files.locations import EMBEDDED, is_fetched
from dflash_aot.cache.grid import Grid, check_positions, default_grid, parse_grid
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.model_config.speculative_config import (
    BY_BATCH_SIZE,
    FLAG,
    SpeculativeConfig,
    choose_k,
    list_range_ks,
)
from dflash_aot.cache.sampling_state import SAMPLING_KINDS, SamplingKind
from dflash_aot.cache.weight_recipe import (
    PLAIN,
    CheckpointRole,
    FloatDtype,
    WeightFormat,
    WeightFormats,
)

# -- differences of two values

ABSENT = "absent"


class FieldChange(msgspec.Struct, frozen=True):
    """A field that differs.

    Attributes:
        field: its dotted name.
        a, b: its values as JSON represents them, ABSENT where there is none.
    """

    field: str
    a: Any
    b: Any


def compare_values(field: str, a: Any, b: Any) -> Iterator[FieldChange]:
    """Yields the innermost differing values of two values of JSON.

    Lists of named objects are compared by name, other lists as a whole.
    """
    a = _by_name(a)
    b = _by_name(b)
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            inner = f"{field}.{key}".lstrip(".")
            yield from compare_values(inner, a.get(key, ABSENT), b.get(key, ABSENT))
    elif a != b:
        yield FieldChange(field, a, b)


def _by_name(value: Any) -> Any:
    """Returns a list of named objects as a mapping from their names, any other value unchanged."""
    if not isinstance(value, list) or not value:
        return value
    if not all(isinstance(one, dict) and "name" in one for one in value):
        return value
    named = {one["name"]: one for one in value}
    return named if len(named) == len(value) else value


def represent_as_json(value: object) -> Any:
    """Returns a value as JSON represents it, ABSENT for a field that is left out."""
    if value is msgspec.UNSET:
        return ABSENT
    return msgspec.json.decode(msgspec.json.encode(value))


# -- the spec


class TargetModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target: `reference`, its checkpoint as the user named it, and its `facts`."""

    reference: str
    facts: Target


class DraftModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The draft: `reference`, its checkpoint as the user named it, and its `facts`."""

    reference: str
    facts: Draft


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The devices that share every layer.

    Attributes:
        platform: as JAX names it.
        topology: the TPU slice that the devices belong to, "" for other platforms.
        devices: how many there are.
    """

    platform: str
    topology: str
    devices: int

    @classmethod
    def of(cls, environment: Environment) -> "Slice":
        """Returns the slice of an environment's devices."""
        return cls(environment.platform, environment.topology, environment.device_count)

    def flags(self) -> dict[str, str]:
        """Returns the flags that select these devices: a whole TPU slice by its name, other devices by number."""
        flags = {"platform": "cuda" if self.platform == "gpu" else self.platform}
        topology = TOPOLOGIES.get(self.topology)
        if topology and topology.devices == self.devices:
            return {**flags, "topology": topology.name}
        return {**flags, "tensor_parallel": str(self.devices)} if self.devices > 1 else flags


class BundleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle is built for: a `PlannedBundle`, or the head of a manifest.

    Attributes:
        target, draft: the checkpoint pair.
        dtype: of activations, kv and plain weights.
        sampling: modes of verification, and whether prompts can be scored.
        grid: all buckets.
        weight_formats: of the models' linear layers; absent if all are plain, and the checkpoints
            were not quantized.
    """

    target: TargetModel
    draft: DraftModel
    dtype: FloatDtype
    sampling: tuple[SamplingKind, ...]
    grid: Grid
    weight_formats: WeightFormats | msgspec.UnsetType = msgspec.UNSET

    @property
    def slice(self) -> Slice:
        """The devices."""
        raise NotImplementedError

    def fields(self) -> dict[str, Any]:
        """Returns the attributes above by name."""
        return {name: getattr(self, name) for name in BundleSpec.__struct_fields__}

    @property
    def formats(self) -> WeightFormats:
        """The format of each model's linear layers."""
        return self.weight_formats or PLAIN

    @property
    def positions(self) -> int:
        """The sequence length that both models were made for."""
        return min(self.target.facts.decoder.reach, self.draft.facts.decoder.reach)

    def flags(self) -> dict[str, str]:
        """Returns the flags of `dflash-precompile` that ask for such a bundle, by name."""
        pair = {"target": self.target.reference, "draft": self.draft.reference}
        formats = self.weight_formats
        weights = {"weights": formats.target, "draft_weights": formats.draft} if formats else {}
        return {
            **({} if self.target.reference == EMBEDDED else pair),
            "buckets": str(self.grid),
            "dtype": self.dtype,
            "sampling": ",".join(self.sampling),
            **{flag: self.dtype if one == "plain" else one for flag, one in weights.items()},
            **self.slice.flags(),
        }

    def build_command(self, bundle: Path) -> str:
        """Returns the command that builds such a bundle from its checkpoints; not where a bundle was fetched to."""
        flags = {"bundle": "DIR" if is_fetched(bundle) else str(bundle), **self.flags()}
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        return shlex.join(["dflash-precompile", *words])

    def differences(self, other: "BundleSpec") -> list[FieldChange]:
        """Returns the fields that must be equal for both to be served by one bundle, and are not.

        Grids and kinds of verification can be merged. Where a checkpoint is, and the K that a draft suggests, change no
        executable.
        """
        return list(compare_values("", self._fixed_facts(), other._fixed_facts()))

    def _fixed_facts(self) -> dict[str, Any]:
        draft = self.draft.facts
        heads = msgspec.structs.replace(draft.heads, k=None)
        facts = {
            "target": self.target.facts,
            "draft": msgspec.structs.replace(draft, heads=heads),
            "dtype": self.dtype,
            "weights": self.formats.target,
            "draft_weights": self.formats.draft,
            **msgspec.structs.asdict(self.slice),
        }
        return {name: represent_as_json(value) for name, value in facts.items()}

    def union(self, built: "BundleSpec", named: Collection[str] = ()) -> "BundleSpec":
        """Returns this spec with grid and kinds of verification of a spec without `differences` added.

        named: the keys of this grid that the user named. Raises BadInput where no grid has the sizes of both.
        """
        kinds = {*self.sampling, *built.sampling}
        return msgspec.structs.replace(
            self,
            grid=self.grid.united(built.grid, named),
            sampling=tuple(kind for kind in SAMPLING_KINDS if kind in kinds),
        )


class PlannedBundle(BundleSpec, frozen=True, kw_only=True):
    """The spec of a bundle that is not built yet.

    Attributes:
        slice: the devices.
    """

    slice: Slice


# -- values of flags


def choose_grid(
    target: Target,
    draft: Draft,
    positions: Mapping[str, int],
    grid: Grid | str | None,
    speculative: SpeculativeConfig,
    reads_own_length: bool,
    flat_in_k: bool,
) -> Grid:
    """Returns the requested grid, or a default one (`default_grid`), with every K that is named.

    `positions` that each model allows, by the name of its config. Raises BadInput.
    """
    k = choose_k(speculative, draft)
    by_batch_size = list_range_ks(speculative.num_speculative_tokens_per_batch_size)
    if grid is None:
        shortest = min(positions.values())
        return default_grid(
            draft.verified_block,
            shortest,
            k,
            by_batch_size,
            reads_own_length=reads_own_length,
            flat_in_k=flat_in_k,
            recurrent=target.recurrent is not None,
        )
    # A Grid is checked as its text is.
    chosen = parse_grid(str(grid), draft.verified_block)
    check_positions(chosen, positions)
    if chosen.saved_states and target.recurrent is None:
        raise BadInput(
            f"saved_states={chosen.saved_states}: the target has no recurrent state. Leave it out: prefixes need only "
            "kv pages"
        )
    if chosen.packed and target.recurrent:
        raise BadInput(
            f"packed={chosen.packed}: the target has recurrent state, which programs change for one prompt at a time. "
            "Leave it out: each prompt has chunks of its own"
        )
    if chosen.mixed and target.recurrent:
        raise BadInput(
            "mixed=1: the target has recurrent state, which no program changes for a round and a chunk at once. Leave "
            "it out: chunks and rounds are calls of their own"
        )
    if chosen.offload and not (target.caches_prefixes or chosen.saved_states):
        raise BadInput(
            "offload=1: prefixes are not shared, because "
            + ("sliding layers keep kv by slot" if target.sliding else "there are no saved_states")
            + ". Leave it out: what no prompt finds again needs no host memory"
        )
    if speculative.num_speculative_tokens not in (None, chosen.k[-1]):
        raise BadInput(
            f"num_speculative_tokens ({FLAG}) is {k}, but the largest k of grid (--buckets) is {chosen.k[-1]}"
        )
    if missing := [str(one) for one in by_batch_size if one not in chosen.k]:
        raise BadInput(
            f"{BY_BATCH_SIZE} ({FLAG}) has K = {', '.join(missing)}, which grid (--buckets) lacks: it has "
            f"k={','.join(map(str, chosen.k))}"
        )
    return chosen


def choose_formats(
    weights: str | None,
    draft_weights: str | None,
    quantized: Collection[CheckpointRole],
    dtype: str,
) -> WeightFormats:
    """Returns the formats that --weights and --draft_weights name.

    Without --draft_weights, --weights counts for the draft too. Without flags, the layers of a `quantized` checkpoint
    are int8, and the layers of other checkpoints have `dtype`. Raises BadInput for another name than "int8" and
    `dtype`.
    """

    def choose(role: CheckpointRole, flag: str, name: str | None) -> WeightFormat:
        if name not in (None, "int8", dtype):
            raise BadInput(
                f"--{flag} {name}: weights are int8, or have the dtype of the arithmetic, --dtype {dtype}"
            )
        return "int8" if name == "int8" or (name is None and role in quantized) else "plain"

    target = choose("target", "weights", weights)
    return WeightFormats(target, choose("draft", "draft_weights", draft_weights or weights))
