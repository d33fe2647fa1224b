"""Answers of the target, with all that the training of the draft needs of its forward passes.

B sequences of a batch · T tokens of a sequence · F width of the features · C labels of a position
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from dflash_aot.compile.models.attention import attend
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.matmul import find_largest_values
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.runtime.text.chat_template import render_chat
from dflash_aot.runtime.text.tokenizer import Tokenizer

from optimize import Weights, run_stage
from products import multiply_in_bfloat16

BATCH, WIDTH = 192, 208
LONGEST_PROMPT = 72
LABELS = 16  # of each position, the likeliest tokens and their logits
TEMPERATURE = 0.7  # of every second answer; the others are greedy
TARGET_LAYERS = (1, 10, 19, 28)


def load_weights(folder: Path, model: AbstractModel[CausalLM]) -> Weights:
    """The target's weights in float32, by the parameters' names."""
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for recipe in model.recipes("target"):
        array = np.empty(recipe.shape, np.float32)
        for part in recipe.placements:
            region = tuple(
                slice(start, start + size)
                for start, size in zip(part.offset, part.extent, strict=True)
            )
            array[region] = tensors[part.tensor].astype(np.float32).reshape(part.extent)
        weights[recipe.name.removeprefix("target.")] = jnp.asarray(array)
    return weights


def encode_questions(questions: Sequence[str], target: Path) -> list[list[int]]:
    """The questions in the chat template, without those of more than LONGEST_PROMPT tokens."""
    tokenizer = Tokenizer.open(target)
    prompts = (
        tokenizer.encode(
            render_chat(target, [{"role": "user", "content": question}]), add_special_tokens=False
        )
        for question in questions
    )
    return [prompt for prompt in prompts if len(prompt) <= LONGEST_PROMPT]


@dataclass(frozen=True)
class Batch:
    """Prompts of a batch, padded to WIDTH.

    Attributes:
        ids: int32 [B, T].
        lengths: tokens of each prompt, int32 [B].
        temperatures: float32 [B].
        seed: of the random numbers.
    """

    ids: np.ndarray
    lengths: np.ndarray
    temperatures: np.ndarray
    seed: int


def make_batch(prompts: Sequence[Sequence[int]], first: int, seed: int) -> Batch:
    """A batch of prompts of which every second is answered greedily, beginning with `first`."""
    ids = np.zeros((len(prompts), WIDTH), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    temperatures = np.where(np.arange(len(prompts)) % 2 == first, 0.0, TEMPERATURE)
    return Batch(ids, lengths, temperatures.astype(np.float32), seed)


def attend_from(start: jax.Array) -> Callable:
    """A causal attention that writes one position of keys and values, `start`, into kv: (keys, values) per layer."""

    def attend_kv(kv, layer, inputs):
        at = (0, 0, start, 0)
        keys, values = (
            jax.lax.dynamic_update_slice(old, new, at)
            for old, new in zip(kv[layer], (inputs.keys, inputs.values), strict=True)
        )
        seen = (jnp.arange(WIDTH) <= start)[None, None]
        mixed = attend(inputs.queries, (keys, values, seen))
        return mixed, (*kv[:layer], (keys, values), *kv[layer + 1 :])

    return attend_kv


def make_writer(model: AbstractModel[CausalLM]) -> Callable:
    """The function that continues prompts: (weights, ids, lengths, temperatures, seed) → arrays of `answer`.

    Each step computes one position of all sequences, of prompts too: all sequences have one program.
    """
    decoder = model.module.target.decoder
    shape = (BATCH, decoder.attention.kv_heads, WIDTH, decoder.attention.head_dim)

    @jax.jit
    def write(weights, ids, lengths, temperatures, seed):
        target = model.bind(weights)

        def run_step(carry, start):
            token, key, kv = carry
            positions = jnp.full((BATCH, 1), start)
            x, features, kv = target.forward(
                token[:, None], positions, TARGET_LAYERS, kv, attend_from(start)
            )
            logits = target.logits(x)[:, 0]
            values, labels = find_largest_values(logits, LABELS)
            key, own = jax.random.split(key)
            # Gumbel's noise on the likeliest tokens draws from them.
            noise = jax.random.gumbel(own, values.shape) * temperatures[:, None]
            drawn = jnp.argmax(values + noise, axis=-1)
            chosen = jnp.take_along_axis(labels, drawn[:, None], axis=1)[:, 0]
            given = ids[:, jnp.minimum(start + 1, WIDTH - 1)]
            following = jnp.where(start + 1 < lengths, given, chosen)
            mass = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            out = token, features[:, 0].astype(jnp.bfloat16), labels, mass
            return (following, key, kv), out

        kv = tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(decoder.layers))
        start = ids[:, 0], jax.random.key(seed), kv
        _, out = jax.lax.scan(run_step, start, jnp.arange(WIDTH))
        return tuple(jnp.moveaxis(array, 0, 1) for array in out)

    return write


def find_ends(ids: np.ndarray, lengths: np.ndarray, end: int) -> np.ndarray:
    """The number of tokens of each sequence up to its end token, which counts: int32 [B]."""
    answered = np.arange(ids.shape[1]) >= lengths[:, None]
    stops = (ids == end) & answered
    return np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, ids.shape[1]).astype(np.int32)


def write_answers(
    target: AbstractModel[CausalLM],
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    end: int,
    out: Path,
    batches: int,
) -> Iterator[dict[str, np.ndarray]]:
    """`batches` of answers, each in a file of its own below `out`, computed only if it is missing.

    When all prompts are answered, they are asked again: what was greedy is drawn then, and the reverse.

    Arrays of a batch: ids int32 [B, T]; features bfloat16 [B, T, F]; labels int32 [B, T, C], the likeliest tokens after
    each position, and their log-probabilities float32; lengths, ends int32 [B], of the prompt and of all.
    """
    write = make_writer(target)
    in_a_pass = len(prompts) // BATCH
    for number in range(batches):

        def compute(_: Path, number: int = number) -> dict[str, np.ndarray]:
            turn, place = divmod(number, in_a_pass)
            batch = make_batch(prompts[place * BATCH :][:BATCH], turn % 2, number)
            with multiply_in_bfloat16():
                arrays = write(weights, batch.ids, batch.lengths, batch.temperatures, batch.seed)
            ids, features, labels, mass = map(np.asarray, arrays)
            ends = find_ends(ids, batch.lengths, end)
            print(f"answers {number + 1}: {(ends - batch.lengths).sum():,} tokens", flush=True)
            return {
                "ids": ids,
                "features": features.astype(ml_dtypes.bfloat16),
                "labels": labels,
                "mass": mass,
                "lengths": batch.lengths,
                "ends": ends,
            }

        yield run_stage(out / f"answers{number:04}.safetensors", compute)
