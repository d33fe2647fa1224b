"""Trains a DFlash2 draft for SmolLM2-135M-Instruct on the target's own answers.

python examples/smollm2/make.py DIR
python examples/smollm2/train_draft.py --pair DIR --out build/smollm2

Writes the draft to OUT/draft. Answers take 8 GB of memory, and as much of OUT's disk. A finished batch of answers is
not computed again; training goes on after its last checkpoint. JAX's devices share the sequences of a step: with
XLA_FLAGS=--xla_force_host_platform_device_count=2 two cores are both busy. The trainer is that of the embedded pair
(examples/embedded_pair), whose networks are the product's.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from msgspec import structs

from dflash_aot.cache.model_config.architecture import (
    BlockConvolution,
    CandidateSelector,
    Draft,
    DraftHeads,
    Target,
)
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.dflash import DFlash
from dflash_aot.compile.models.layers import LayerForm
from dflash_aot.compile.models.parameters import AbstractModel

sys.path.append(str(Path(__file__).parents[1] / "embedded_pair"))
from answers import BATCH, TARGET_LAYERS, encode_questions, load_weights, write_answers
from checkpoint import save_draft
from draft_training import list_positions, run_blocks
from optimize import Weights, init_weights, run_stage, train
from prompts import choose_questions

PAIR = flags.DEFINE_string("pair", None, "the directory that make.py wrote", required=True)
OUT = flags.DEFINE_string("out", "build/smollm2", "directory of answers, checkpoints and draft/")
BATCHES = flags.DEFINE_integer("batches", 36, f"batches of {BATCH} answers", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 6800, "training steps", lower_bound=2)
CHECKPOINT_STEPS = flags.DEFINE_integer(
    "checkpoint_steps", 200, "steps between two checkpoints", lower_bound=1
)

LAYERS, BLOCK = 3, 8
MASK = 16  # <|empty_output|>, which no answer has
LEARNING_RATE = 1e-3, 1e-5  # at the peak, at the end
SEQUENCES, ANCHORS = 8, 20  # of a step
DECAY = (
    4.0  # row i has weight exp(-(i-1)/DECAY), because a rejected token also rejects all that follow
)
SHARPNESS = 1.5  # factor of the target's log-probabilities before they become labels
# A step computes logits of the likeliest tokens of the training data, and of random others in place of the rest.
FREQUENT, OTHERS = 4096, 512
SEED = 48
FLOAT32 = LayerForm("float32")
Arrays = Mapping[str, np.ndarray]


def make_draft_facts(target: Target) -> Draft:
    """LAYERS of the target's shape, with queries and keys normed as Qwen3's."""
    attention = structs.replace(target.decoder.attention, normed=True)
    return Draft(
        structs.replace(target.decoder, layers=LAYERS, attention=attention),
        BLOCK,
        MASK,
        TARGET_LAYERS,
        target.decoder.hidden,
        (None,) * LAYERS,
        convolution=BlockConvolution(kernel=2, group=16),
        heads=DraftHeads(selector=CandidateSelector(rank=64, candidates=16)),
    )


def start_from_target(draft: AbstractModel[DFlash], target: Weights) -> Weights:
    """Initial weights: the target's last layers, which read its last features as their context.

    The codes of predecessors are projected embeddings, so that similar tokens begin alike.
    """
    weights = init_weights(draft.shapes(), LAYERS, SEED)
    depth = 1 + max(int(name.split(".")[2]) for name in target if "layers." in name)
    for layer in range(LAYERS):
        source = f"model.layers.{depth - LAYERS + layer}."
        for name in draft.shapes():
            own = name.removeprefix(f"layers.{layer}.")
            if own != name and source + own in target:
                weights[name] = target[source + own]
        attention = f"{source}self_attn."
        norm = target[f"{source}input_layernorm.weight"]
        for part, matrix in (("q", target[f"{attention}q"]), ("k", target[f"{attention}kv"][:, 0])):
            # The usual size of queries and keys, which their norm would remove.
            size = jnp.sqrt(jnp.mean(jnp.sum((matrix * norm) ** 2, axis=-1)))
            name = f"layers.{layer}.self_attn.{part}_norm.weight"
            weights[name] = jnp.full_like(weights[name], size)
    weights["norm.weight"] = target["model.norm.weight"]
    weights["hidden_norm.weight"] = target[f"model.layers.{depth - 1}.input_layernorm.weight"]
    hidden = len(weights["norm.weight"])
    weights["fc.weight"] = weights["fc.weight"].at[:, -hidden:].set(jnp.eye(hidden))
    embedding = target["model.embed_tokens.weight"]
    codes = embedding @ jax.random.normal(jax.random.key(SEED), (hidden, 64))
    weights["candidate_selector.predecessor_codebook"] = codes / jnp.std(codes)
    return weights


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that have logits in training.

    Attributes:
        frequent: tokens, int32 [FREQUENT].
        rest: all others.
        places: of each token among the frequent ones; FREQUENT for others.
    """

    frequent: np.ndarray
    rest: np.ndarray
    places: np.ndarray


def choose_vocabulary(data: Sequence[Arrays], vocab: int) -> Vocabulary:
    """The tokens that the target finds likeliest in its answers."""
    mass = np.zeros(vocab)
    for batch in data:
        mass += np.bincount(batch["labels"].ravel(), np.exp(batch["mass"]).ravel(), vocab)
    order = np.argsort(-mass, kind="stable").astype(np.int32)
    places = np.full(vocab, FREQUENT, np.int32)
    places[order[:FREQUENT]] = np.arange(FREQUENT)
    return Vocabulary(order[:FREQUENT], order[FREQUENT:], places)


def make_batches(
    data: Sequence[Arrays], vocabulary: Vocabulary
) -> Iterator[tuple[np.ndarray, ...]]:
    """For each step: ids, features, labels' places and log-probabilities, anchors, ends, tokens that have logits."""
    rng = np.random.default_rng(SEED)
    width = data[0]["ids"].shape[1]
    long = [
        (number, row)
        for number, batch in enumerate(data)
        for row in np.flatnonzero(batch["ends"] - batch["lengths"] >= 4)
    ]
    while True:
        order = rng.permutation(long)
        for chosen in order[: len(order) // SEQUENCES * SEQUENCES].reshape(-1, SEQUENCES, 2):

            def take(name: str, chosen: np.ndarray = chosen) -> np.ndarray:
                return np.stack([data[number][name][row] for number, row in chosen])

            first, ends = take("lengths"), take("ends")
            last = np.minimum(ends - 2, width - BLOCK)
            share = rng.random((SEQUENCES, ANCHORS))
            anchors = first[:, None] + (share * (last - first + 1)[:, None]).astype(np.int32)
            others = rng.choice(vocabulary.rest, OTHERS, replace=False)
            yield (
                take("ids"),
                take("features"),
                vocabulary.places[take("labels")],
                take("mass"),
                anchors.astype(np.int32),
                ends,
                np.concatenate([vocabulary.frequent, others]),
            )


def share_sequences(
    batches: Iterator[tuple[np.ndarray, ...]], mesh: Mesh
) -> Iterator[tuple[jax.Array, ...]]:
    """The batches on devices, each of which has a part of the sequences, and all tokens that have logits."""
    split, whole = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (mesh.axis_names, ()))
    for *by_sequence, tokens in batches:
        yield (*jax.device_put(by_sequence, split), jax.device_put(tokens, whole))


def compute_loss(
    models: tuple[AbstractModel[CausalLM], AbstractModel[DFlash]],
    embeddings: Weights,
    weights: Weights,
    *batch: jax.Array,
) -> jax.Array:
    """Weighted mean cross entropy of all rows but the anchors; `batch` as `make_batches` yields it."""
    ids, features, places, mass, anchors, ends, tokens = batch
    model, drafter = models[0].bind(embeddings), models[1].bind(weights)
    hidden = run_blocks(model, drafter, BLOCK, ids, features.astype(jnp.float32), anchors)
    positions = list_positions(anchors, BLOCK)
    head = model.embed(tokens)
    vocab = model.target.decoder.vocab
    # Each random token stands for its share of all that have no logits.
    stands_for = jnp.where(
        jnp.arange(len(tokens)) < FREQUENT, 0.0, jnp.log((vocab - FREQUENT) / OTHERS)
    )
    logits = hidden @ head.T + stands_for
    selector = drafter.candidate_selector
    previous = jnp.take_along_axis(ids, positions - 1, axis=1)
    codes = selector.predecessor_codebook[...][previous] * selector.hidden_projection(hidden)
    scores = logits + codes @ selector.successor_codebook[...][tokens].T

    # The token at a position is chosen after the position before it.
    def take(array: jax.Array) -> jax.Array:
        return jnp.take_along_axis(array, positions[..., None] - 1, axis=1)

    labels = jax.nn.softmax(take(mass) * SHARPNESS, axis=-1)
    at = take(places)
    labels = jnp.where(at < FREQUENT, labels, 0.0)
    offset = jnp.arange(positions.shape[1]) % BLOCK
    weight = jnp.where(offset == 0, 0.0, jnp.exp(-(offset - 1) / DECAY))
    weight = jnp.where(positions < ends[:, None], weight, 0.0)

    def cross_entropy(values: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(values, jnp.minimum(at, FREQUENT - 1), axis=-1)
        losses = labels.sum(-1) * jax.nn.logsumexp(values, axis=-1) - (labels * chosen).sum(-1)
        return (losses * weight).sum() / weight.sum()

    return (cross_entropy(logits) + cross_entropy(scores)) / 2


def main(_: list[str]) -> None:
    folder, out = Path(PAIR.value) / "target", Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    facts = read_target(read_config(folder))
    target = AbstractModel(lambda: CausalLM(facts, FLOAT32))
    weights = load_weights(folder, target)
    questions = [question for _, question in choose_questions(False, BATCH * BATCHES.value)]
    prompts = encode_questions(questions, folder)
    end = read_config(folder).integer("eos_token_id")
    data = list(write_answers(target, weights, prompts, end, out, BATCHES.value))
    tokens = sum((batch["ends"] - batch["lengths"]).sum() for batch in data)
    print(f"{len(data) * BATCH:,} answers of {tokens:,} tokens", flush=True)

    draft = AbstractModel(lambda: DFlash(make_draft_facts(facts), FLOAT32))
    automatic = (AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("sequences",), axis_types=automatic)
    batches = make_batches(data, choose_vocabulary(data, facts.decoder.vocab))
    rows = share_sequences(islice(batches, STEPS.value), mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    embedding = weights["model.embed_tokens.weight"]
    embeddings = jax.device_put({"model.embed_tokens.weight": embedding}, whole)
    start = jax.device_put(start_from_target(draft, weights), whole)

    def loss(weights: Weights, *batch: jax.Array) -> jax.Array:
        return compute_loss((target, draft), embeddings, weights, *batch)

    def compute(checkpoint: Path) -> Weights:
        plan = LEARNING_RATE, STEPS.value, checkpoint, CHECKPOINT_STEPS.value
        return train("draft", start, loss, rows, *plan)

    trained = run_stage(out / "draft.safetensors", compute)
    trained = {name: jnp.asarray(array) for name, array in trained.items()}
    recipes = draft.recipes("draft")
    save_draft(out / "draft", draft.module.draft, facts.decoder.layers, trained, recipes)


if __name__ == "__main__":
    app.run(main)
