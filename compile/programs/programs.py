"""The programs (prefill, draft, verify, kv_write, rounds, ...): pure functions of named arrays, one per signature.

B rows · T positions of this call · K drafted tokens of a block · F width of the features
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import msgspec

from dflash_aot.cache.grid import Grid
from dflash_aot.cache.model_config.architecture import Draft, SlidingWindow, Target
from dflash_aot.cache.sampling_state import check_sampling_kinds, count_top_logprobs
from dflash_aot.cache.signature import (
    CHOOSING_STATE,
    MULTI_ROUND_PROGRAMS,
    RECURRENT_STATE,
    SAMPLED_PROGRAMS,
    SAMPLING_STATE,
    ArraySpec,
    ProgramWeights,
    Signature,
    arrays_by_name,
    derive_pair_shapes,
    list_signatures,
    state_arrays,
)
from dflash_aot.cache.weight_recipe import PLAIN, MaskedMap, WeightFormats, WeightRecipe
from dflash_aot.compile.kernels.kernel_choice import attend_pages
from dflash_aot.compile.kernels.kernel_device import AttendingBlock, KernelDevice
from dflash_aot.compile.models.attention import CAUSAL, LayerWindows, attend_context
from dflash_aot.compile.models.causal_lm import Attend, CausalLM, Mix
from dflash_aot.compile.models.dflash import AttendBlock, DFlash
from dflash_aot.compile.models.gated_delta_net import GatedDeltaMixer
from dflash_aot.compile.models.kv_cache import (
    KvArrays,
    KvContext,
    make_rows,
    put_rows,
    write_block,
    write_kv,
)
from dflash_aot.compile.models.layer_loop import LayerIndex
from dflash_aot.compile.models.layers import WeightKind
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.compile.models.recurrent_state import (
    RecurrentState,
    choose_kernels,
    copy_slot,
    make_pending,
    prefill_layer,
    verify_layer,
)
from dflash_aot.compile.models.tensor_parallel import TensorParallel, check_divisible
from dflash_aot.compile.programs.sampling import (
    PENALTY_EXCHANGES,
    SAMPLING_EXCHANGES,
    SCORING_EXCHANGES,
    TargetForward,
    apply_mask,
    choose_tokens,
    commit_round,
    compute_logprobs,
    count_tokens,
    draw_draft_scores,
    score_tokens,
)

Arrays = Mapping[str, jax.Array]
Outputs = dict[str, jax.Array]
Recurrent = TypeVar("Recurrent")
# What the target's layers pass on: the block's keys and values by layer, and the recurrent state or its updates.
TargetCarry = tuple[KvArrays, Recurrent]
# Parameters of each draft layer that make the context keys and values.
CONTEXT_PARAMETERS = (
    "self_attn.kv",
    "self_attn.kv_scale",
    "self_attn.kv_bias",
    "self_attn.k_norm.weight",
)


class MultiRoundState(NamedTuple):
    """The loop state of a multi-round step, between two rounds.

    Attributes:
        done: int32, rounds that are done.
        left: int32 [B], tokens that each row has left to generate; a row with 0 or less is done.
        state: the donated state by name.
        verdicts: int32 [rounds, B, 2K+2], one verdict per round and row, -1 where the row did not take part.
        features: [B, rounds, F], features whose context is not written yet (K = 0 only).
    """

    done: jax.Array
    left: jax.Array
    state: Outputs
    verdicts: jax.Array
    features: jax.Array


@dataclass(frozen=True)
class ProgramForm:
    """How programs are written for a kind of device.

    Attributes:
        stacked: whether layers are loops over stacked weights (TPU) or unrolled.
        kernels: the device that kernels are lowered for; None: XLA's operations only.
        by_page: whether XLA's operations attend to one page at a time (CPU) or to gathered pages.
    """

    stacked: bool = False
    kernels: KernelDevice | None = None
    by_page: bool = False


UNROLLED = ProgramForm(by_page=True)  # of a CPU
STACKED = ProgramForm(stacked=True)


class Programs:
    """All programs of a checkpoint pair: their signatures, the weights that they take, and their functions.

    Attributes:
        pair: the shapes of both models, from which the signatures follow.
        kernels: the device that kernels are lowered for, None if the programs use none.
        formats: of the models' linear layers.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft,
        dtype: str,
        form: ProgramForm = UNROLLED,
        devices: int = 1,
        sampling: Sequence[str] = ("greedy",),
        formats: WeightFormats = PLAIN,
    ):
        """Describes both models; nothing is allocated.

        Args:
            target: facts of the target.
            draft: facts of the draft.
            dtype: of activations, plain weights and kv arrays.
            form: how the programs are written.
            devices: number of devices that share heads, MLPs and vocabulary.
            sampling: what is built, of "greedy", "sample", "constrain" and "prompt_logprobs".
            formats: of the models' linear layers.

        Raises BadInput if a size cannot be shared evenly, or a kind of verification is unknown.
        """
        check_divisible(target, draft, devices)
        self._tp = TensorParallel(devices)
        self._form = form
        target_kind = WeightKind(dtype, formats.target)
        draft_kind = WeightKind(dtype, formats.draft)
        # a head that is not pruned may be the target's
        head = draft_kind if draft.pruned else target_kind
        self._target = AbstractModel(
            lambda: CausalLM(target, target_kind, form.stacked, self._tp, form.kernels)
        )
        self._draft = AbstractModel(
            lambda: DFlash(draft, draft_kind, form.stacked, self._tp, head, form.kernels)
        )
        self._facts = draft
        self.kernels = form.kernels
        self.formats = formats
        self.pair = derive_pair_shapes(
            target, draft, dtype, check_sampling_kinds(sampling, "sampling")
        )

    def recipes(self) -> tuple[WeightRecipe, ...]:
        """How the runtime makes every weight argument from checkpoint tensors."""
        own = (self._with_fallback(recipe) for recipe in self._draft.recipes("draft"))
        return (*self._target.recipes("target"), *own)

    def _with_fallback(self, recipe: WeightRecipe) -> WeightRecipe:
        """A draft's recipe with its fallback and its check.

        Checkpoints of speculators 0.9.0 leave out an embedding or head that equals the target's: the target's tensor
        is the fallback. The vocabulary map `d2t` is checked against the mask `t2d`.
        """
        fallbacks = {"draft.embed_tokens.weight": "target.model.embed_tokens.weight"}
        if not self._facts.pruned:
            head = "lm_head" if hasattr(self._target.module, "lm_head") else "model.embed_tokens"
            fallbacks |= {
                f"draft.lm_head.{part}": f"target.{head}.{part}"
                for part in ("weight", "weight_scale")
            }
        mapped = MaskedMap("t2d", self._facts.decoder.vocab) if recipe.name == "draft.d2t" else None
        return msgspec.structs.replace(recipe, otherwise=fallbacks.get(recipe.name), mapped=mapped)

    def arrays_by_name(self, grid: Grid) -> dict[str, ArraySpec]:
        """State and weights by name: the arrays to which signatures refer."""
        return arrays_by_name(state_arrays(self.pair, grid), self.recipes())

    def weights(self) -> ProgramWeights:
        """The weights of each program, by name."""
        target = tuple(f"target.{name}" for name in self._target.shapes())
        draft = tuple(f"draft.{name}" for name in self._draft.shapes())
        ends = tuple(name for name in target if "embed_tokens" in name or "lm_head" in name)
        borrowed = ends if self._facts.vocab is None else ()
        projection = tuple(
            name for name in draft if name.startswith(("draft.fc.", "draft.hidden_norm."))
        )
        context = tuple(name for name in draft if name.endswith(CONTEXT_PARAMETERS))
        return ProgramWeights(
            target=target,
            draft=(*borrowed, *(name for name in draft if name not in projection)),
            context=(*projection, *context),
        )

    def list_signatures(self, grid: Grid) -> list[Signature]:
        """The signatures of all executables of a grid."""
        return list_signatures(self.pair, grid, self.weights())

    def collectives(self, signature: Signature) -> int:
        """How many collectives the program needs; an executable with more was partitioned badly.

        A target or draft forward has two sums per layer (of a loop over layers, those of its body), one for the
        embedding and one exchange for the choice of a token. A kv_write has one sum, after `fc`. Sampling adds
        `SAMPLING_EXCHANGES`, scoring a prompt `SCORING_EXCHANGES`, a candidate selector the exchange of its codes, a
        draft that draws `PENALTY_EXCHANGES`.
        """
        if self._tp.count == 1 or signature.program in ("move", "admit"):
            return 0
        count = self._count_collectives
        if signature.program not in MULTI_ROUND_PROGRAMS.values():
            return count(signature.program, draws=self.pair.samples)
        samples = signature.program in SAMPLED_PROGRAMS
        drafted = count("draft", samples) if signature.bucket["k"] else 0
        verified = count("sampled_verify") - SCORING_EXCHANGES if samples else count("verify")
        return drafted + verified + count("kv_write")

    def _count_collectives(self, program: str, draws: bool = False) -> int:
        if program == "kv_write":
            return 1
        if program == "draft":
            written = 1 if self._form.stacked else self._facts.decoder.layers
        else:
            written = self._target.module.model.count_written_layers()
        sampling = SAMPLING_EXCHANGES if program in SAMPLED_PROGRAMS else 0
        sampling += SCORING_EXCHANGES if program == "scored_prefill" else 0
        if program == "draft":
            sampling += (1 if self._facts.selector else 0) + (PENALTY_EXCHANGES if draws else 0)
        return 2 + sampling + 2 * written

    def function(self, signature: Signature) -> Callable[[Arrays], Outputs]:
        """The function of a program: inputs by name → donated state and results by name."""
        functions: dict[str, Callable[[Arrays], Outputs]] = {
            "prefill": partial(self.prefill, length=signature.bucket.get("length", 0)),
            "scored_prefill": partial(self.prefill, length=signature.bucket.get("length", 0)),
            "draft": partial(self.draft, **_bucket_sizes(signature)),
            "verify": partial(self.verify, **_bucket_sizes(signature)),
            "sampled_verify": partial(self.sampled_verify, **_bucket_sizes(signature)),
            "constrained_verify": partial(self.sampled_verify, **_bucket_sizes(signature)),
            "kv_write": self.kv_write,
            "rounds": partial(self.rounds, signature=signature),
            "sampled_rounds": partial(self.rounds, signature=signature),
            "move": self.move,
            "admit": self.admit,
        }
        return functions[signature.program]

    def prefill(self, arrays: Arrays, length: int) -> Outputs:
        """Runs the target over one chunk of one slot's prompt, and with `gives_first` picks the token after it.

        Positions from `counts` on are padding: they are written after the new length, where nothing reads them. With
        `next_tokens`, the scored prefill, it also returns their log-probabilities and the likeliest tokens.
        """
        target = self._target.bind(_weights_of("target", arrays))
        tokens, slots, starts, counts = (
            arrays[name] for name in ("tokens", "slots", "starts", "counts")
        )
        before = (
            RecurrentState(*(arrays[name] for name in RECURRENT_STATE))
            if self.pair.recurrent
            else None
        )

        def mix(
            carry: TargetCarry[Any], layer: LayerIndex, mixer: GatedDeltaMixer, x: jax.Array
        ) -> tuple[jax.Array, TargetCarry[Any]]:
            rows, recurrent = carry
            mixed, recurrent = prefill_layer(
                recurrent, layer, mixer, x, slots[0], starts[0], counts[0]
            )
            return mixed, (rows, recurrent)

        x, features, kv, recurrent = self._run_target(
            arrays, target, tokens, starts, length, before, mix
        )
        scores: Outputs = {}
        end = counts
        if (wanted := arrays.get("next_tokens")) is not None:
            logprobs, tokens_found, tops = score_tokens(
                x, wanted, target.logits, count_top_logprobs(self.pair.vocab), self._tp
            )
            scores = {"logprobs": logprobs, "top_tokens": tokens_found, "top_logprobs": tops}
            end = self._tp.order_after(counts, logprobs[:, 0])
        last = jax.lax.dynamic_slice_in_dim(x, end[0] - 1, 1, axis=1)

        def choose_token() -> tuple[jax.Array, jax.Array]:
            first = self._tp.argmax(target.logits(last))[:, 0]
            return first, jax.lax.dynamic_update_slice(arrays["anchors"], first, slots)

        def keep_anchor() -> tuple[jax.Array, jax.Array]:
            return jnp.zeros((1,), jnp.int32), arrays["anchors"]

        # Only the last chunk of a prompt gives a token: the others do without the product with the vocabulary.
        first, anchors = jax.lax.cond(arrays["gives_first"][0], choose_token, keep_anchor)
        return {
            **(dict(zip(RECURRENT_STATE, recurrent, strict=True)) if recurrent else {}),
            "target_k": kv[0],
            "target_v": kv[1],
            "lengths": jax.lax.dynamic_update_slice(arrays["lengths"], starts + counts, slots),
            "anchors": anchors,
            "features": features,
            "first": first,
            **scores,
        }

    def draft(self, arrays: Arrays, batch: int, length: int, k: int) -> Outputs:
        """Drafts K tokens per row, with one pass over the block of the trained width, whatever K is.

        Position 0 of the block is the anchor. Positions 1 … K give the drafted tokens: the likeliest ones, or if
        `sampled` the ones drawn with the noise of the verification.
        """
        target = self._target.bind(_weights_of("target", arrays))
        draft = self._draft.bind(_weights_of("draft", arrays))
        lengths = arrays["lengths"][:batch]
        anchors = arrays["anchors"][:batch]
        masks = jnp.full((batch, self._facts.block - 1), self._facts.mask_token, jnp.int32)
        ids = jnp.concatenate([anchors[:, None], masks], axis=1)
        positions = lengths[:, None] + jnp.arange(self._facts.block)

        kv = (arrays["draft_k"], arrays["draft_v"])
        tables = arrays["pages"]
        attend = self._block_attention(kv, tables, lengths, length, self._facts.windows)
        hidden = draft.block_hidden(draft.embed(ids, target), positions, attend)
        adjust = None
        if "sampled" in arrays:
            state = {name: arrays[name] for name in ("counts", *CHOOSING_STATE)}
            adjust = partial(
                draw_draft_scores,
                positions=positions[:, 1 : k + 1],
                sampled=arrays["sampled"],
                penalised=arrays["penalised"],
                state=state,
                tp=self._tp,
            )
        drafted = draft.propose(hidden, anchors, target, k, adjust)
        return {"block": jnp.concatenate([anchors[:, None], drafted], axis=1)}

    def verify(self, arrays: Arrays, batch: int, length: int, k: int) -> Outputs:
        """Greedy verification: runs the target over the block and accepts the drafted prefix that it agrees with.

        A row of the verdict, int32 [2K+2]: the number of accepted tokens, K drafted tokens, K+1 chosen tokens.
        """
        forward = self._target_forward(arrays, batch, length, k)
        chosen = self._tp.argmax(forward.logits)
        accepted, outputs = commit_round(arrays, forward, chosen)
        return {
            **outputs,
            "verdict": jnp.concatenate([accepted[:, None], forward.block[:, 1:], chosen], axis=1),
        }

    def sampled_verify(
        self, arrays: Arrays, batch: int, length: int, k: int, scores: bool = True
    ) -> Outputs:
        """Sampled verification: as `verify`, with tokens chosen by each slot's sampling state.

        The accepted tokens have the distribution that they would have without a draft. A row of the verdict has K+1
        more elements, the bits of the chosen tokens' log-probabilities (float32). As `constrained_verify` each position
        chooses among its `allowed` tokens. Without `scores` no log-probabilities are computed: the verdict is that of
        `verify`.
        """
        forward = self._target_forward(arrays, batch, length, k)
        active = arrays["active"]
        state = {name: arrays[name][:batch] for name in ("counts", *CHOOSING_STATE)}
        # The barrier takes the counts out of the state array. If a branch read them in place, XLA would copy the whole
        # array before it is written.
        state["counts"] = jax.lax.optimization_barrier(state["counts"])
        drafted = forward.block[:, 1:]
        logits = forward.logits
        if (allowed := arrays.get("allowed")) is not None:
            logits = apply_mask(logits, allowed, self._tp.own_tokens(logits.shape[-1]))
        chosen = choose_tokens(logits, forward.positions + 1, drafted, active, state, self._tp)
        scored: Outputs = {}
        bits: Sequence[jax.Array] = ()
        if scores:
            wanted = jnp.any(active & (arrays["tops"][:batch] > 0))
            likelihood, tokens, tops = compute_logprobs(
                forward.logits, chosen, wanted, count_top_logprobs(self.pair.vocab), self._tp
            )
            bits = [jax.lax.bitcast_convert_type(likelihood, jnp.int32)]
            scored = {"top_tokens": tokens, "top_logprobs": tops}
        accepted, outputs = commit_round(arrays, forward, chosen)
        committed = active[:, None] & (jnp.arange(k + 1) <= accepted[:, None])
        counts = state["counts"] + count_tokens(
            chosen, committed, self._tp.own_tokens(state["counts"].shape[1])
        )
        return {
            **outputs,
            **scored,
            "counts": jax.lax.dynamic_update_slice(arrays["counts"], counts, (0, 0)),
            "verdict": jnp.concatenate([accepted[:, None], drafted, chosen, *bits], axis=1),
        }

    def _target_forward(self, arrays: Arrays, batch: int, length: int, k: int) -> TargetForward:
        """The target over the block: the anchor and K drafted tokens of each row."""
        target = self._target.bind(_weights_of("target", arrays))
        lengths = arrays["lengths"][:batch]
        anchors = arrays["anchors"][:batch]
        block = arrays["block"] if k else anchors[:, None]
        state = None
        room = None
        delta = None
        if sizes := self._target.module.target.recurrent:
            state = RecurrentState(*(arrays[name] for name in RECURRENT_STATE))
            delta = choose_kernels(self.kernels, state, sizes, k + 1)
            room = make_pending(state, sizes, batch, k + 1, delta)

        def mix(
            carry: TargetCarry[Any], layer: LayerIndex, mixer: GatedDeltaMixer, x: jax.Array
        ) -> tuple[jax.Array, TargetCarry[Any]]:
            rows, pending = carry
            assert state is not None
            mixed, pending = verify_layer(state, pending, layer, mixer, x, lengths, delta)
            return mixed, (rows, pending)

        x, features, kv, pending = self._run_target(
            arrays, target, block, lengths, length, room, mix
        )
        positions = lengths[:, None] + jnp.arange(k + 1)
        return TargetForward(
            lengths, anchors, block, positions, target.logits(x), features, kv, pending, delta
        )

    def _run_target(
        self,
        arrays: Arrays,
        target: CausalLM,
        ids: jax.Array,
        starts: jax.Array,
        length: int,
        recurrent: Recurrent,
        mix: Mix[TargetCarry[Recurrent]],
    ) -> tuple[jax.Array, jax.Array, KvArrays, Recurrent]:
        """The target over blocks `ids` [B, T] at positions `starts` [B], and its kv with the blocks written.

        Returns hidden states before the final norm, features, kv, and what `mix` made of `recurrent`.
        """
        kv = (arrays["target_k"], arrays["target_v"])
        tables = arrays["pages"]
        positions = starts[:, None] + jnp.arange(ids.shape[1])
        attend = self._causal_attention(kv, tables, starts, length)
        carry = (make_rows(kv, *ids.shape), recurrent)
        x, features, (rows, recurrent) = target.forward(
            ids, positions, self._facts.target_layer_ids, carry, attend, mix
        )
        x, kv = write_block(x, kv, rows, tables, starts)
        return x, features, kv, recurrent

    def _causal_attention(
        self, kv: KvArrays, tables: jax.Array, starts: jax.Array, length: int
    ) -> Attend[TargetCarry[Any]]:
        """The target's attention, see `_block_attention`. The block's keys and values go into the carry."""
        attend_block = self._block_attention(kv, tables, starts, length, [CAUSAL] * kv[0].shape[0])

        def attend(
            carry: TargetCarry[Any],
            layer: LayerIndex,
            q: jax.Array,
            keys: jax.Array,
            values: jax.Array,
        ) -> tuple[jax.Array, TargetCarry[Any]]:
            rows, recurrent = carry
            return attend_block(layer, q, keys, values), (
                put_rows(rows, layer, keys, values),
                recurrent,
            )

        return attend

    def _block_attention(
        self,
        kv: KvArrays,
        tables: jax.Array,
        starts: jax.Array,
        length: int,
        windows: Sequence[SlidingWindow | None],
    ) -> AttendBlock:
        """Attention of blocks at positions `starts` [B] to the kv positions before them, and to themselves.

        kv is read up to `length` positions per row, by the page tables [B, E]. Each layer has a window or None.
        """

        def attend(
            layer: LayerIndex, q: jax.Array, keys: jax.Array, values: jax.Array
        ) -> jax.Array:
            seen = LayerWindows(windows, layer)
            block = AttendingBlock(q, keys, values, starts, seen.limits(), seen.slides)
            mixed = attend_pages(self.kernels, block, kv, layer, tables, length)
            if mixed is not None:
                return mixed
            positions = starts[:, None] + jnp.arange(q.shape[3])

            def mask(at: jax.Array) -> jax.Array:
                return (at < starts[:, None])[:, None] & seen.context_mask(positions, at[None])

            context = KvContext(*kv, layer, tables, length)
            own = keys, values, seen.block_mask(positions)
            return attend_context(q, context, mask, starts, own, by_page=self._form.by_page)

        return attend

    def kv_write(self, arrays: Arrays) -> Outputs:
        """Writes the draft's context keys and values for all features.

        Those of rejected tokens are written too: they lie after the length until the next round overwrites them.
        """
        draft = self._draft.bind(_weights_of("draft", arrays))
        features = arrays["features"]
        tables = arrays["pages"]
        starts = arrays["starts"]
        positions = starts[:, None] + jnp.arange(features.shape[1])

        kv = (arrays["draft_k"], arrays["draft_v"])
        rows = draft.write_context(features, positions, put_rows, make_rows(kv, *positions.shape))
        keys, values = write_kv(kv, rows, tables, starts)
        return {"draft_k": keys, "draft_v": values}

    def rounds(self, arrays: Arrays, signature: Signature) -> Outputs:
        """Multi-round step: runs rounds of the active rows until `count` are done or no row has tokens left.

        Rows that are done stay inactive, as in a single round. With `stop_early` the step ends after the first round
        in which a row is done, or was before: another request waits for its place. The first round always runs.

        With K = 0 no round reads the draft's kv, so all rounds' context is written once, after the last round.
        """
        batch, length, k, max_rounds = (
            signature.bucket[axis] for axis in ("batch", "length", "k", "rounds")
        )
        samples = signature.program in SAMPLED_PROGRAMS
        verify: Callable[..., Outputs] = (
            partial(self.sampled_verify, scores=False) if samples else self.verify
        )
        # A draft has two flags: `penalised` is an argument of sampled rounds, `sampled` is always true here.
        flags: Outputs = {"sampled": jnp.ones((1,), jnp.bool_)} if samples else {}
        active = arrays["active"]
        first_positions = arrays["lengths"][:batch]

        def has_next_round(carry: MultiRoundState) -> jax.Array:
            is_running = carry.left > 0
            stops_early = arrays["stop_early"][0] & jnp.any(active & ~is_running)
            may_go_on = (carry.done == 0) | ~stops_early
            return (carry.done < arrays["count"][0]) & jnp.any(active & is_running) & may_go_on

        def run_round(carry: MultiRoundState) -> MultiRoundState:
            running = active & (carry.left > 0)
            now = {**arrays, **flags, **carry.state, "active": running}
            block = self.draft(now, batch, length, k) if k else {}
            verified = verify({**now, **block}, batch, length, k)
            verdict = verified["verdict"]
            features = self._tp.order_after(verified["features"], verdict[:, :1, None])
            written = self.kv_write({**now, **verified, "features": features}) if k else {}
            accepted = verdict[:, 0]
            chosen = verdict[:, k + 1 :]
            committed = jnp.arange(k + 1) <= accepted[:, None]
            is_end = jnp.any(chosen[:, :, None] == arrays["ends"][:, None], axis=2)
            left = jnp.where(jnp.any(committed & is_end, axis=1), 0, carry.left - accepted - 1)
            outcome = jnp.where(running[:, None], verdict, -1)
            return MultiRoundState(
                done=carry.done + 1,
                left=jnp.where(running, left, carry.left),
                state={
                    name: {**carry.state, **verified, **written}[name] for name in signature.donated
                },
                verdicts=jax.lax.dynamic_update_slice(
                    carry.verdicts, outcome[None], (carry.done, 0, 0)
                ),
                features=carry.features
                if k
                else jax.lax.dynamic_update_slice(carry.features, features, (0, carry.done, 0)),
            )

        feature_width = len(self._facts.target_layer_ids) * self._facts.target_hidden
        last = jax.lax.while_loop(
            has_next_round,
            run_round,
            MultiRoundState(
                done=jnp.int32(0),
                left=arrays["left"],
                state={name: arrays[name] for name in signature.donated},
                verdicts=jnp.full((max_rounds, batch, 2 * k + 2), -1, jnp.int32),
                features=jnp.zeros((batch, 0 if k else max_rounds, feature_width), self.pair.dtype),
            ),
        )
        context: Outputs = {}
        if not k:
            features = {"features": last.features, "starts": first_positions}
            context = self.kv_write({**arrays, **last.state, **features})
        return {**last.state, **context, "verdicts": last.verdicts, "left_over": last.left}

    def move(self, arrays: Arrays) -> Outputs:
        """Copies length, anchor, sampling and recurrent state of slot `source` over those of slot `destination`."""
        source = arrays["source"][0]
        destination = arrays["destination"][0]
        large = RECURRENT_STATE if self.pair.recurrent else ()
        moved = {name: copy_slot(arrays[name], source, destination) for name in large}
        small = ("lengths", "anchors", *(SAMPLING_STATE if self.pair.samples else ()))
        return {
            **moved,
            **{name: arrays[name].at[destination].set(arrays[name][source]) for name in small},
        }

    def admit(self, arrays: Arrays) -> Outputs:
        """Initialises the sampling state of slot `slots`, and its length and anchor if `anchor` is not negative."""
        slot = arrays["slots"]
        given = arrays["anchor"] >= 0
        starts = {"lengths": arrays["starts"], "anchors": arrays["anchor"]}
        kept = {name: jax.lax.dynamic_slice(arrays[name], slot, (1,)) for name in starts}
        rows = {name: jnp.where(given, start, kept[name]) for name, start in starts.items()}
        rows |= {name: arrays[f"slot_{name}"] for name in SAMPLING_STATE}
        rows |= {name: self._tp.own_slice(rows[name]) for name in ("bias", "prompted", "counts")}
        return {
            name: jax.lax.dynamic_update_slice_in_dim(arrays[name], row, slot[0], 0)
            for name, row in rows.items()
        }


def _weights_of(model: str, arrays: Arrays) -> Outputs:
    """The weights of one model, without the prefix of its role."""
    prefix = f"{model}."
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _bucket_sizes(signature: Signature) -> dict[str, Any]:
    return {
        axis: size for axis, size in signature.bucket.items() if axis in ("batch", "length", "k")
    }
