"""Both models of a checkpoint pair, as the programs call them.

B rows · T positions of this call · F width of the features
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from dflash_aot.cache.arrays import PairShapes
from dflash_aot.cache.model_config.architecture import Draft, SlidingWindow
from dflash_aot.compile.kernels.kernel_device import AttendingBlock
from dflash_aot.compile.models.attention import LayerWindows
from dflash_aot.compile.models.causal_lm import Attend, CausalLM, Mix
from dflash_aot.compile.models.dflash import AttendBlock, DFlash
from dflash_aot.compile.models.kv_cache import KvArrays, KvContext, make_rows, put_rows
from dflash_aot.compile.models.layer_loop import LayerIndex
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.compile.models.tensor_parallel import TensorParallel

Arrays = Mapping[str, jax.Array]
Recurrent = TypeVar("Recurrent")
# What the target's layers pass on: the block's keys and values by layer, and the recurrent state or its updates.
TargetCarry = tuple[KvArrays, Recurrent]


@dataclass(frozen=True)
class PairModels:
    """The models of a pair; nothing is allocated.

    Attributes:
        target, draft: the models without weights.
        facts: of the draft.
        shapes: of both models, from which the signatures follow.
        tp: the devices that share both models, and their backend.
    """

    target: AbstractModel[CausalLM]
    draft: AbstractModel[DFlash]
    facts: Draft
    shapes: PairShapes
    tp: TensorParallel

    def bind_target(self, arrays: Arrays) -> CausalLM:
        """The target with its weights among `arrays`."""
        return self.target.bind(_weights_of("target", arrays))

    def bind_draft(self, arrays: Arrays) -> DFlash:
        """The draft with its weights among `arrays`."""
        return self.draft.bind(_weights_of("draft", arrays))

    def run_target(
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
        attend = self._attend_causally(kv, tables, starts, length)
        carry = (make_rows(kv, *ids.shape), recurrent)
        x, features, (rows, recurrent) = target.forward(
            ids, positions, self.facts.target_layer_ids, carry, attend, mix
        )
        x, kv = self.tp.backend.write_block(x, kv, rows, tables, starts)
        return x, features, kv, recurrent

    def _attend_causally(
        self, kv: KvArrays, tables: jax.Array, starts: jax.Array, length: int
    ) -> Attend[TargetCarry[Any]]:
        """The target's attention, see `attend_block`. The block's keys and values go into the carry."""
        attend_block = self.attend_block(
            kv, tables, starts, length, self.target.module.target.windows
        )

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

    def attend_block(
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
            return self.tp.backend.attend(block, KvContext(*kv, layer, tables, length), seen)

        return attend

    def count_forward_collectives(self, written_layers: int) -> int:
        """Of a forward: two sums per layer (of a loop, those of its body), the embedding, the choice of a token."""
        return 2 + 2 * written_layers

    def count_target_collectives(self) -> int:
        """Of a target forward with the choice of a token."""
        return self.count_forward_collectives(self.target.module.model.count_written_layers())


def _weights_of(model: str, arrays: Arrays) -> dict[str, jax.Array]:
    """The weights of one model, without the prefix of its role."""
    prefix = f"{model}."
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
