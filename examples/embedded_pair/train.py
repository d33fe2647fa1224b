"""Trains a target and its draft on the sources of the standard library, in stages, and writes both checkpoints.

python examples/embedded_pair/train.py --out build/pair                  # the embedded pair
python examples/embedded_pair/train.py --out build/pair2 --draft_kind dflash2 --vocab 1024 --hidden 512 --layers 8 \\
    --draft_layers 2

A finished stage is not repeated. A stage that was interrupted goes on behind its last checkpoint, with the numbers of a
run that was not interrupted. Other sizes need another directory.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import app, flags
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from dflash_aot.cache.model_config.architecture import (
    AttentionShape,
    BlockConvolution,
    CandidateSelector,
    Decoder,
    DenseMlp,
    Draft,
    Target,
)
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.dflash import DFlash
from dflash_aot.compile.models.layers import WeightKind
from dflash_aot.compile.models.parameters import AbstractModel

from checkpoint import save_draft, save_target
from corpus import MASK, read_split, token_stream, train_tokenizer
from draft_training import plan_phases, train_phase
from optimize import init_weights
from rollouts import roll_out
from target_training import next_token_loss, train_target

OUT = flags.DEFINE_string("out", "build/pair", "directory to write target/ and draft/ to")
DRAFT_KIND = flags.DEFINE_enum("draft_kind", "dflash", ["dflash", "dflash2"], "kind of the draft")
# With so small a vocabulary a token is about two characters, so that many tokens are easy to predict for the draft.
VOCAB = flags.DEFINE_integer("vocab", 384, "tokens of the vocabulary")
HIDDEN = flags.DEFINE_integer("hidden", 256, "hidden width of both models, whose MLPs have twice as much")
flags.register_validator("hidden", lambda width: width > 0 and width % 128 == 0, "it must be a multiple of 128")
LAYERS = flags.DEFINE_integer("layers", 8, "layers of the target", lower_bound=5)
DRAFT_LAYERS = flags.DEFINE_integer("draft_layers", 3, "layers of the draft", lower_bound=1)
TARGET_STEPS = flags.DEFINE_integer("target_steps", 2200, "training steps of the target, of 2048 tokens each")
DRAFT_STEPS = flags.DEFINE_integer("draft_steps", 5700, "training steps of the draft")
ROLLOUTS = flags.DEFINE_integer("rollouts", 4608, "sequences that the target generates to train the draft, by 64")
CHECKPOINT_STEPS = flags.DEFINE_integer("checkpoint_steps", 200, "steps between two checkpoints", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "seed of all random numbers")

POSITIONS = 2048
FLOAT32 = WeightKind("float32")
CONVOLUTION, SELECTOR = BlockConvolution(kernel=2, group=16), CandidateSelector(rank=64, candidates=16)


def decoder(layers: int) -> Decoder:
    attention = AttentionShape(heads=HIDDEN.value // 64, kv_heads=HIDDEN.value // 128, head_dim=64)
    rope = Rope(10000.0, attention.head_dim)
    mlp = DenseMlp(2 * HIDDEN.value)
    return Decoder(layers, HIDDEN.value, mlp, attention, rope, 1e-6, VOCAB.value, POSITIONS)


def describe_draft(target: Target, block: int, mask: int) -> Draft:
    """A draft that reads the target's second layer, one in the middle, and the last but one."""
    depth, layers = target.decoder.layers, DRAFT_LAYERS.value
    parts = {"convolution": CONVOLUTION, "selector": SELECTOR} if DRAFT_KIND.value == "dflash2" else {}
    taps = (1, (depth - 1) // 2, depth - 2)
    return Draft(decoder(layers), block, mask, taps, target.decoder.hidden, (None,) * layers, **parts)


def as_stored(weights: dict) -> dict:
    """The weights as rounded in the checkpoint, because the later stages must use the target that will be served."""
    return {name: leaf.astype(jnp.bfloat16).astype(jnp.float32) for name, leaf in weights.items()}


def main(_: list[str]) -> None:
    out = Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    texts = read_split(held_out=False)
    if not (out / "tokenizer.json").exists():
        train_tokenizer(texts, VOCAB.value).save(str(out / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    stream = token_stream(tokenizer, texts)
    held_out = token_stream(tokenizer, read_split(held_out=True))
    print(
        f"{len(stream):,} training tokens, {len(held_out):,} held out, "
        f"{sum(map(len, texts)) / len(stream):.2f} characters each"
    )

    sizes = Target(decoder(LAYERS.value), tied=True)
    target = AbstractModel(lambda: CausalLM(sizes, FLOAT32))
    print(f"target: {sum(shape.size for shape in target.shapes().values()):,} parameters", flush=True)
    checkpoint, every = out / "unfinished.safetensors", CHECKPOINT_STEPS.value
    if not (out / "target.safetensors").exists():
        weights = train_target(target, stream, TARGET_STEPS.value, SEED.value, checkpoint, every)
        save_file({name: np.asarray(leaf) for name, leaf in weights.items()}, out / "target.safetensors")
    weights = {name: jnp.asarray(leaf) for name, leaf in load_file(out / "target.safetensors").items()}
    save_target(out / "target", sizes, weights, target.recipes("target"), tokenizer)
    weights = as_stored(weights)
    rows = held_out[: len(held_out) // 257 * 257].reshape(-1, 257)[:64]
    print(f"held-out loss {float(next_token_loss(target, weights, jnp.asarray(rows))):.3f}", flush=True)

    if not (out / "rollouts.safetensors").exists():
        save_file(
            {"ids": roll_out(target, weights, stream, ROLLOUTS.value, SEED.value + 1)}, out / "rollouts.safetensors"
        )
    ids = load_file(out / "rollouts.safetensors")["ids"]

    phases = plan_phases(DRAFT_STEPS.value)
    facts = describe_draft(sizes, phases[-1].block, tokenizer.token_to_id(MASK))
    draft = AbstractModel(lambda: DFlash(facts, FLOAT32))
    print(f"draft: {sum(shape.size for shape in draft.shapes().values()):,} parameters", flush=True)
    drafted = init_weights(draft.shapes(), facts.decoder.layers, SEED.value + 2)
    for index, phase in enumerate(phases):
        stage = out / f"draft{index}.safetensors"
        if not stage.exists():
            seed, models = SEED.value + 2 + index, (target, draft)
            drafted = train_phase(models, weights, as_stored(drafted), ids, phase, seed, checkpoint, every)
            save_file({name: np.asarray(leaf) for name, leaf in drafted.items()}, stage)
        drafted = {name: jnp.asarray(leaf) for name, leaf in load_file(stage).items()}
    save_draft(out / "draft", facts, LAYERS.value, drafted, draft.recipes("draft"))


if __name__ == "__main__":
    app.run(main)
