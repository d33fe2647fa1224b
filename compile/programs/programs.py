"""The programs: pure functions of named arrays, one per signature.

B rows · T positions of this call · S kv positions · K verified tokens · H hidden
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec

from dflash_aot.cache.bundle.weight_recipe import MaskedMap, WeightRecipe
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.sampling_state import check_sampling_modes, count_top_logprobs
from dflash_aot.cache.signature import (
    SAMPLING_STATE,
    ArraySpec,
    ProgramWeights,
    Signature,
    arrays_by_name,
    derive_pair_shapes,
    list_signatures,
    state_arrays,
)
from dflash_aot.compile.models.attention import attend_context
from dflash_aot.compile.models.causal_lm import Attend, CausalLM
from dflash_aot.compile.models.dflash import DFlash
from dflash_aot.compile.models.kv_cache import KvContext, copy_slot, write_rows
from dflash_aot.compile.models.layer_loop import LayerIndex
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.compile.models.sliding_window import LayerWindows
from dflash_aot.compile.models.tensor_parallel import TensorParallel, check_divisible
from dflash_aot.compile.programs.sampling import SAMPLING_EXCHANGES, choose_tokens, compute_logprobs, count_tokens

Arrays = Mapping[str, jax.Array]
Outputs = dict[str, jax.Array]
# What the draft makes its context keys and values with, per layer.
CONTEXT_PARAMETERS = ("self_attn.kv", "self_attn.kv_bias", "self_attn.k_norm.weight")
KvArrays = tuple[jax.Array, jax.Array]  # keys and values, each [L, N, G, C, D]


class Programs:
    """A pair of models as the functions that signatures describe."""

    def __init__(
        self,
        target: Target,
        draft: Draft,
        dtype: str,
        stacked: bool = False,
        devices: int = 1,
        sampling: Sequence[str] = ("greedy",),
    ):
        """`stacked`: layers as loops over stacked weights, as TPU wants them. `devices` share heads, MLP, vocabulary.

        `sampling`: the kinds of verification. Raises BadInput where devices cannot share, or a kind is not known.
        """
        check_divisible(target, draft, devices)
        self._tp, self._stacked = TensorParallel(devices), stacked
        self._target = AbstractModel(lambda: CausalLM(target, dtype, stacked, self._tp))
        self._draft = AbstractModel(lambda: DFlash(draft, dtype, stacked, self._tp))
        self._facts = draft
        self.pair = derive_pair_shapes(target, draft, dtype, check_sampling_modes(sampling, "sampling"))

    def recipes(self) -> tuple[WeightRecipe, ...]:
        """How the runtime makes every weight argument."""
        own = (self._complete(recipe) for recipe in self._draft.recipes("draft"))
        return (*self._target.recipes("target"), *own)

    def _complete(self, recipe: WeightRecipe) -> WeightRecipe:
        """What speculators 0.9.0 leaves out is the target's; a map into its vocabulary is held to its mask."""
        ends = {"draft.embed_tokens.weight": "target.model.embed_tokens.weight"}
        if not self._facts.pruned:
            tied = self._target.module.target.tied
            ends["draft.lm_head.weight"] = f"target.{'model.embed_tokens' if tied else 'lm_head'}.weight"
        mapped = MaskedMap("t2d", self._facts.decoder.vocab) if recipe.name == "draft.d2t" else None
        return msgspec.structs.replace(recipe, otherwise=ends.get(recipe.name), mapped=mapped)

    def arrays_by_name(self, grid: Grid) -> dict[str, ArraySpec]:
        """State and weights by name, as signatures refer to them."""
        return arrays_by_name(state_arrays(self.pair, grid), self.recipes())

    def weights(self) -> ProgramWeights:
        """Which weights each program takes."""
        target = tuple(f"target.{name}" for name in self._target.shapes())
        draft = tuple(f"draft.{name}" for name in self._draft.shapes())
        ends = tuple(name for name in target if "embed_tokens" in name or "lm_head" in name)
        borrowed = ends if self._facts.vocab is None else ()
        entry = tuple(name for name in draft if name.startswith(("draft.fc.", "draft.hidden_norm.")))
        context = tuple(name for name in draft if name.endswith(CONTEXT_PARAMETERS))
        return ProgramWeights(
            target=target, draft=(*borrowed, *(name for name in draft if name not in entry)), context=(*entry, *context)
        )

    def list_signatures(self, grid: Grid) -> list[Signature]:
        return list_signatures(self.pair, grid, self.weights())

    def collectives(self, signature: Signature) -> int:
        """How many instructions of the program let devices talk: the sums of a layer, and what its ends exchange.

        Two sums in the loop over layers or in each layer, one for the embedding, one exchange for the choice of a
        token; a kv_write sums once, behind `fc`. Sampling takes more, see `SAMPLING_EXCHANGES`.
        """
        if self._tp.count == 1 or signature.program in ("move", "admit"):
            return 0
        parts = {"rounds": ("draft", "verify", "kv_write") if signature.bucket.get("k") else ("verify", "kv_write")}
        return sum(map(self._count_collectives, parts.get(signature.program, (signature.program,))))

    def _count_collectives(self, program: str) -> int:
        if program == "kv_write":
            return 1
        decoder = (self._draft.module.draft if program == "draft" else self._target.module.target).decoder
        sampling = SAMPLING_EXCHANGES if program == "sampled_verify" else 0
        return 2 + sampling + 2 * (1 if self._stacked else decoder.layers)

    def function(self, signature: Signature) -> Callable[[Arrays], Outputs]:
        """The program as a function of its inputs by name; returns donated state and results by name."""
        functions: dict[str, Callable[[Arrays], Outputs]] = {
            "prefill": partial(self.prefill, length=signature.bucket.get("length", 0)),
            "draft": partial(self.draft, **_sizes(signature)),
            "verify": partial(self.verify, **_sizes(signature)),
            "sampled_verify": partial(self.sampled_verify, **_sizes(signature)),
            "kv_write": self.kv_write,
            "rounds": partial(self.rounds, signature=signature),
            "move": self.move,
            "admit": self.admit,
        }
        return functions[signature.program]

    def prefill(self, arrays: Arrays, length: int) -> Outputs:
        """One chunk of one slot; rows past `counts` write behind the new length, where nothing reads them."""
        target = self._target.bind(_of("target", arrays))
        tokens, slots, starts, counts = (arrays[name] for name in ("tokens", "slots", "starts", "counts"))
        positions = starts[:, None] + jnp.arange(tokens.shape[1])
        kv = (arrays["target_k"], arrays["target_v"])
        x, features, kv = target.forward(
            tokens, positions, self._facts.target_layer_ids, kv, _causal_attention(slots, positions, length)
        )
        last = jax.lax.dynamic_slice_in_dim(x, counts[0] - 1, 1, axis=1)
        first = self._tp.argmax(target.logits(last))[:, 0]
        return {
            "target_k": kv[0],
            "target_v": kv[1],
            "lengths": jax.lax.dynamic_update_slice(arrays["lengths"], starts + counts, slots),
            "anchors": jax.lax.dynamic_update_slice(arrays["anchors"], first, slots),
            "features": features,
            "first": first,
        }

    def draft(self, arrays: Arrays, batch: int, length: int, k: int) -> Outputs:
        """The trained block, whatever K: row 0 is the anchor, rows 1 … K are read."""
        target, draft = self._target.bind(_of("target", arrays)), self._draft.bind(_of("draft", arrays))
        lengths, anchors = arrays["lengths"][:batch], arrays["anchors"][:batch]
        masks = jnp.full((batch, self._facts.block - 1), self._facts.mask_token, jnp.int32)
        ids = jnp.concatenate([anchors[:, None], masks], axis=1)
        positions = lengths[:, None] + jnp.arange(self._facts.block)

        def attend_both(layer: LayerIndex, q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
            windows = LayerWindows(self._facts.windows, layer)

            def seen(at: jax.Array) -> jax.Array:
                return (at < lengths[:, None])[:, None] & windows.context_mask(positions, at[None])

            context = KvContext(arrays["draft_k"], arrays["draft_v"], layer, 0, batch, length)
            return attend_context(q, context, seen, lengths.max(), (keys, values, windows.block_mask(positions)))

        hidden = draft.block_hidden(draft.embed(ids, target), positions, attend_both)
        drafted = draft.to_target(self._tp.argmax(draft.logits(hidden[:, 1 : k + 1], target)))
        return {"block": jnp.concatenate([anchors[:, None], drafted], axis=1)}

    def verify(self, arrays: Arrays, batch: int, length: int, k: int) -> Outputs:
        """The target over the block, and what follows from it."""
        judged = self._target_forward(arrays, batch, length, k)
        chosen = self._tp.argmax(judged.logits)
        accepted, moved = _advance(arrays, judged, chosen)
        return {**moved, "verdict": jnp.concatenate([accepted[:, None], judged.block[:, 1:], chosen], axis=1)}

    def sampled_verify(self, arrays: Arrays, batch: int, length: int, k: int) -> Outputs:
        """The same with tokens chosen as each slot asks. What stands of the block is as likely as without a draft."""
        judged, active = self._target_forward(arrays, batch, length, k), arrays["active"]
        state = {name: arrays[name][:batch] for name in SAMPLING_STATE}
        # Taken out for good: where a branch reads them in place, all of them are copied before they are written.
        state["counts"] = jax.lax.optimization_barrier(state["counts"])
        drafted = judged.block[:, 1:]
        chosen = choose_tokens(judged.logits, judged.positions + 1, drafted, active, state, self._tp)
        wanted = jnp.any(active & (state["tops"] > 0))
        likelihood, tokens, tops = compute_logprobs(
            judged.logits, chosen, wanted, count_top_logprobs(self.pair.vocab), self._tp
        )
        accepted, moved = _advance(arrays, judged, chosen)
        committed = active[:, None] & (jnp.arange(k + 1) <= accepted[:, None])
        counts = state["counts"] + count_tokens(chosen, committed, self._tp.own_tokens(state["counts"].shape[1]))
        bits = jax.lax.bitcast_convert_type(likelihood, jnp.int32)
        return {
            **moved,
            "counts": jax.lax.dynamic_update_slice(arrays["counts"], counts, (0, 0)),
            "verdict": jnp.concatenate([accepted[:, None], drafted, chosen, bits], axis=1),
            "top_tokens": tokens,
            "top_logprobs": tops,
        }

    def _target_forward(self, arrays: Arrays, batch: int, length: int, k: int) -> "TargetForward":
        """The target over the block."""
        target = self._target.bind(_of("target", arrays))
        lengths, anchors = arrays["lengths"][:batch], arrays["anchors"][:batch]
        block = arrays["block"] if k else anchors[:, None]
        positions = lengths[:, None] + jnp.arange(k + 1)
        kv = (arrays["target_k"], arrays["target_v"])
        slots = jnp.arange(batch)
        x, features, kv = target.forward(
            block, positions, self._facts.target_layer_ids, kv, _causal_attention(slots, positions, length)
        )
        return TargetForward(lengths, anchors, block, positions, target.logits(x), features, kv)

    def kv_write(self, arrays: Arrays) -> Outputs:
        """Every row of the features, rejected ones too: they lie behind the length until they are overwritten."""
        draft = self._draft.bind(_of("draft", arrays))
        features, slots, starts = arrays["features"], arrays["slots"], arrays["starts"]
        positions = starts[:, None] + jnp.arange(features.shape[1])

        def write(kv: KvArrays, layer: LayerIndex, k: jax.Array, v: jax.Array) -> KvArrays:
            return write_rows(kv[0], layer, k, slots, starts), write_rows(kv[1], layer, v, slots, starts)

        keys, values = draft.write_context(features, positions, write, (arrays["draft_k"], arrays["draft_v"]))
        return {"draft_k": keys, "draft_v": values}

    def rounds(self, arrays: Arrays, signature: Signature) -> Outputs:
        """Rounds one after the other, as long as there is something left to generate.

        Without drafts nothing reads the draft's kv in between: it is written once, behind the last round.
        """
        length, k, most = (signature.bucket[axis] for axis in ("length", "k", "rounds"))
        slot, active = jnp.zeros((1,), jnp.int32), jnp.ones((1,), jnp.bool_)
        begin = arrays["lengths"][:1]

        def goes_on(carry: "MultiRoundState") -> jax.Array:
            return (carry.done < arrays["count"][0]) & (carry.left > 0)

        def run(carry: "MultiRoundState") -> "MultiRoundState":
            now = {**arrays, **carry.state, "active": active, "slots": slot}
            block = self.draft(now, 1, length, k) if k else {}
            judged = self.verify({**now, **block}, 1, length, k)
            written = self.kv_write({**now, **judged}) if k else {}
            accepted, chosen = judged["verdict"][0, 0], judged["verdict"][0, k + 1 :]
            stands = jnp.arange(k + 1) <= accepted
            ended = jnp.any(stands[:, None] & (chosen[:, None] == arrays["ends"]))
            return MultiRoundState(
                done=carry.done + 1,
                left=jnp.where(ended, 0, carry.left - accepted - 1),
                state={name: {**carry.state, **judged, **written}[name] for name in signature.state},
                verdicts=jax.lax.dynamic_update_slice(carry.verdicts, judged["verdict"], (carry.done, 0)),
                features=_replace_row(carry.features, judged["features"], carry.done) if not k else carry.features,
            )

        wide = len(self._facts.target_layer_ids) * self._facts.target_hidden
        last = jax.lax.while_loop(
            goes_on,
            run,
            MultiRoundState(
                done=jnp.int32(0),
                left=arrays["left"][0],
                state={name: arrays[name] for name in signature.state},
                verdicts=jnp.full((most, 2 * k + 2), -1, jnp.int32),
                features=jnp.zeros((1, 0 if k else most, wide), self.pair.dtype),
            ),
        )
        kept = (
            {}
            if k
            else self.kv_write({**arrays, **last.state, "features": last.features, "slots": slot, "starts": begin})
        )
        return {**last.state, **kept, "verdicts": last.verdicts, "left_over": last.left[None]}

    def move(self, arrays: Arrays) -> Outputs:
        """Slot `source` copied over slot `destination`."""
        source, destination = arrays["source"][0], arrays["destination"][0]
        kv = ("target_k", "target_v", "draft_k", "draft_v")
        copied = {name: copy_slot(arrays[name], source, destination) for name in kv}
        small = ("lengths", "anchors", *(SAMPLING_STATE if self.pair.samples else ()))
        return {**copied, **{name: arrays[name].at[destination].set(arrays[name][source]) for name in small}}

    def admit(self, arrays: Arrays) -> Outputs:
        """How slot `slots` chooses its tokens, and where it starts if an anchor is given."""
        slot, given = arrays["slots"], arrays["anchor"] >= 0
        starts = {"lengths": arrays["starts"], "anchors": arrays["anchor"]}
        kept = {name: jax.lax.dynamic_slice(arrays[name], slot, (1,)) for name in starts}
        rows = {name: jnp.where(given, start, kept[name]) for name, start in starts.items()}
        rows |= {name: arrays[f"slot_{name}"] for name in SAMPLING_STATE if name != "counts"}
        rows |= {name: self._tp.own_slice(rows[name]) for name in ("bias", "prompted")}
        rows["counts"] = jnp.zeros((1, arrays["counts"].shape[1]), jnp.int32)
        return {name: jax.lax.dynamic_update_slice_in_dim(arrays[name], row, slot[0], 0) for name, row in rows.items()}


class MultiRoundState(NamedTuple):
    """Between two rounds of one dispatch: how many are done, how many tokens are left to generate, state by name.

    verdicts [rounds, 2K+2]; features [1, rounds, F] of those that nothing was written of yet.
    """

    done: jax.Array
    left: jax.Array
    state: Outputs
    verdicts: jax.Array
    features: jax.Array


class TargetForward(NamedTuple):
    """What the target makes of a block: logits [B, K+1, V] of the token behind each of its rows, features, the kv.

    lengths, anchors [B] are those before the round; block, positions [B, K+1].
    """

    lengths: jax.Array
    anchors: jax.Array
    block: jax.Array
    positions: jax.Array
    logits: jax.Array
    features: jax.Array
    kv: KvArrays


def _advance(arrays: Arrays, judged: TargetForward, chosen: jax.Array) -> tuple[jax.Array, Outputs]:
    """How many drafted tokens stand [B], and what a round leaves of the target: the active rows move on."""
    accepted, bonus = accept(judged.block, chosen)
    active, origin = arrays["active"], jnp.zeros((1,), jnp.int32)
    moved = jnp.where(active, judged.lengths + accepted + 1, judged.lengths)
    return accepted, {
        "target_k": judged.kv[0],
        "target_v": judged.kv[1],
        "lengths": jax.lax.dynamic_update_slice(arrays["lengths"], moved, origin),
        "anchors": jax.lax.dynamic_update_slice(arrays["anchors"], jnp.where(active, bonus, judged.anchors), origin),
        "features": judged.features,
        "starts": judged.lengths,
    }


def accept(block: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """block [B, K+1] is what was verified, chosen [B, K+1] what the target picks behind each of its rows.

    Returns how many drafted tokens stand, 0 … K, and the target's own token behind them, both int32 [B].
    """
    matches = block[:, 1:] == chosen[:, :-1]
    accepted = jnp.cumprod(matches.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    bonus = jnp.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
    return accepted, bonus


def _causal_attention(slots: jax.Array, positions: jax.Array, length: int) -> Attend[KvArrays]:
    """Writes each row's T keys and values at its first position, then attends to everything up to each row.

    slots [B], positions [B, T]; kv is the pair of arrays [L, N, G, C, D].
    """
    starts, reach = positions[:, 0], positions.max() + 1

    def seen(at: jax.Array) -> jax.Array:
        return at <= positions[..., None]

    def attend_kv(
        kv: KvArrays, layer: LayerIndex, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, KvArrays]:
        keys, values = write_rows(kv[0], layer, k, slots, starts), write_rows(kv[1], layer, v, slots, starts)
        context = KvContext(keys, values, layer, slots[0], slots.shape[0], length)
        return attend_context(q, context, seen, reach), (keys, values)

    return attend_kv


def _replace_row(features: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(features, row, (0, at, 0))


def _of(model: str, arrays: Arrays) -> Outputs:
    """The weights of one model, under its own names."""
    prefix = f"{model}."
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _sizes(signature: Signature) -> dict[str, Any]:
    return {axis: size for axis, size in signature.bucket.items() if axis in ("batch", "length", "k")}
