"""Trains the embedded pair on the sources of the standard library, in stages; a finished stage is not repeated.

python examples/embedded_pair/train.py --out build/pair
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import app, flags
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from dflash_aot.cache.model_config.architecture import AttentionShape, Decoder, DenseMlp, Draft, Target
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.dflash import DFlash
from dflash_aot.compile.models.parameters import AbstractModel

from checkpoint import save_draft, save_target
from corpus import MASK, read_split, token_stream, train_tokenizer
from draft_training import PHASES, train_phase
from optimize import init_weights
from rollouts import roll_out
from target_training import next_token_loss, train_target

OUT = flags.DEFINE_string("out", "build/pair", "directory to write target/ and draft/ to")
TARGET_STEPS = flags.DEFINE_integer("target_steps", 2200, "training steps of the target, of 2048 tokens each")
ROLLOUTS = flags.DEFINE_integer("rollouts", 4608, "sequences that the target generates to train the draft")
SEED = flags.DEFINE_integer("seed", 0, "seed of all random numbers")

# With so small a vocabulary a token is about two characters, so that many tokens are easy to predict for the draft.
VOCAB, POSITIONS = 384, 2048
ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=64)


def decoder(layers: int) -> Decoder:
    return Decoder(layers, 256, DenseMlp(512), ATTENTION, Rope(10000.0, ATTENTION.head_dim), 1e-6, VOCAB, POSITIONS)


TARGET = Target(decoder(8), tied=True)


def as_stored(weights: dict) -> dict:
    """The weights as rounded in the checkpoint, because the later stages must use the target that will be served."""
    return {name: leaf.astype(jnp.bfloat16).astype(jnp.float32) for name, leaf in weights.items()}


def main(_: list[str]) -> None:
    out = Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    texts = read_split(held_out=False)
    if not (out / "tokenizer.json").exists():
        train_tokenizer(texts, VOCAB).save(str(out / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    stream = token_stream(tokenizer, texts)
    held_out = token_stream(tokenizer, read_split(held_out=True))
    print(
        f"{len(stream):,} training tokens, {len(held_out):,} held out, "
        f"{sum(map(len, texts)) / len(stream):.2f} characters each"
    )

    target = AbstractModel(lambda: CausalLM(TARGET, "float32"))
    if not (out / "target.safetensors").exists():
        weights = train_target(target, stream, TARGET_STEPS.value, SEED.value)
        save_file({name: np.asarray(leaf) for name, leaf in weights.items()}, out / "target.safetensors")
    weights = {name: jnp.asarray(leaf) for name, leaf in load_file(out / "target.safetensors").items()}
    save_target(out / "target", TARGET, weights, target.recipes("target"), tokenizer)
    weights = as_stored(weights)
    rows = held_out[: len(held_out) // 257 * 257].reshape(-1, 257)[:64]
    print(f"held-out loss {float(next_token_loss(target, weights, jnp.asarray(rows))):.3f}", flush=True)

    if not (out / "rollouts.safetensors").exists():
        save_file(
            {"ids": roll_out(target, weights, stream, ROLLOUTS.value, SEED.value + 1)}, out / "rollouts.safetensors"
        )
    ids = load_file(out / "rollouts.safetensors")["ids"]

    mask = tokenizer.token_to_id(MASK)
    facts = Draft(decoder(3), PHASES[-1].block, mask, (1, 3, 6), TARGET.decoder.hidden, (None,) * 3)
    draft = AbstractModel(lambda: DFlash(facts, "float32"))
    drafted = init_weights(draft.shapes(), facts.decoder.layers, SEED.value + 2)
    for index, phase in enumerate(PHASES):
        stage = out / f"draft{index}.safetensors"
        if not stage.exists():
            drafted = train_phase((target, draft), weights, as_stored(drafted), ids, phase, SEED.value + 2 + index)
            save_file({name: np.asarray(leaf) for name, leaf in drafted.items()}, stage)
        drafted = {name: jnp.asarray(leaf) for name, leaf in load_file(stage).items()}
    save_draft(out / "draft", facts, TARGET.decoder.layers, drafted, draft.recipes("draft"))


if __name__ == "__main__":
    app.run(main)
