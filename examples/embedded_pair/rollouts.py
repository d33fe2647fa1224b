"""Greedy rollouts of the target: the training data of the draft."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_aot.compile.models.attention import attend
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.parameters import AbstractModel

from corpus import windows
from optimize import Weights

PROMPT, GENERATED, BATCH = 64, 192, 64
WIDTH = PROMPT + GENERATED


def _attend_from(start: jax.Array):
    """A causal attention that writes keys and values at `start` into kv, a tuple of (keys, values) per layer."""

    def attend_kv(kv, layer, inputs):
        q = inputs.queries
        at = (0, 0, start, 0)
        keys, values = (
            jax.lax.dynamic_update_slice(old, new, at)
            for old, new in zip(kv[layer], (inputs.keys, inputs.values), strict=True)
        )
        seen = jnp.arange(WIDTH) <= start + jnp.arange(q.shape[-2])[:, None]
        return attend(q, (keys, values, seen[None])), (
            *kv[:layer],
            (keys, values),
            *kv[layer + 1 :],
        )

    return attend_kv


def roll_out(
    target: AbstractModel[CausalLM], weights: Weights, stream: np.ndarray, count: int, seed: int
) -> np.ndarray:
    """`count` sequences of PROMPT corpus tokens and GENERATED greedy tokens: int32 [count, WIDTH].

    `count` is a multiple of BATCH.
    """
    decoder = target.module.target.decoder
    shape = (BATCH, decoder.attention.kv_heads, WIDTH, decoder.attention.head_dim)

    def forward(weights, ids, start, kv):
        positions = jnp.broadcast_to(start + jnp.arange(ids.shape[1]), ids.shape)
        model = target.bind(weights)
        x, _, kv = model.forward(ids, positions, (0,), kv, _attend_from(start))
        return jnp.argmax(model.logits(x[:, -1:]), axis=-1).astype(jnp.int32), kv

    @jax.jit
    def write(weights, prompts):
        kv = tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(decoder.layers))
        token, kv = forward(weights, prompts, 0, kv)

        def generate_token(carry, start):
            token, kv = carry
            following, kv = forward(weights, token, start, kv)
            return (following, kv), token[:, 0]

        _, written = jax.lax.scan(generate_token, (token, kv), jnp.arange(PROMPT, WIDTH))
        return jnp.concatenate([prompts, written.T], axis=1)

    rng = np.random.default_rng(seed)
    done = []
    for index in range(count // BATCH):
        done.append(np.asarray(write(weights, windows(stream, BATCH, PROMPT, rng))))
        print(f"rollouts {(index + 1) * BATCH}/{count}", flush=True)
    return np.concatenate(done)
