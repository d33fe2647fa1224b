"""Trains a target and its draft on the sources of the standard library, in stages, and writes both checkpoints.

python examples/embedded_pair/train.py --out build/pair                  # the embedded pair
python examples/embedded_pair/train.py --out build/pair2 --draft_kind dflash --hidden 512 --draft_layers 2

A finished stage is not repeated. A stage that was interrupted goes on after its last checkpoint, with the numbers of a
run that was not interrupted. Other settings than those of the directory's first run (settings.json) are refused.
"""

import json
import sys
from functools import cache, partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tokenizers import Tokenizer

from dflash_aot.cache.model_config.architecture import (
    AttentionShape,
    BlockConvolution,
    CandidateSelector,
    Decoder,
    DenseMlp,
    Draft,
    DraftHeads,
    MarkovHead,
    Target,
)
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.dflash import DFlash
from dflash_aot.compile.models.layers import LayerForm
from dflash_aot.compile.models.parameters import AbstractModel

from checkpoint import save_draft, save_target, write_json
from corpus import MASK, SPECIAL, read_split, token_stream, train_tokenizer
from draft_training import LEAST_STEPS, plan_phases, run_target, train_phase
from optimize import Weights, init_weights, run_stage
from rollouts import BATCH, roll_out
from target_training import next_token_loss, train_target

LEAST_VOCAB = 256 + len(SPECIAL)  # a token for each byte
OUT = flags.DEFINE_string("out", "build/pair", "directory to write target/ and draft/ to")
DRAFT_KIND = flags.DEFINE_enum(
    "draft_kind", "dflash2", ["dflash", "dflash2", "dspark"], "kind of the draft"
)
VOCAB = flags.DEFINE_integer("vocab", 1024, "tokens of the vocabulary", lower_bound=LEAST_VOCAB)
HIDDEN = flags.DEFINE_integer(
    "hidden", 384, "hidden width of both models, whose MLPs have twice as much"
)
flags.register_validator(
    "hidden", lambda width: width > 0 and width % 128 == 0, "it must be a multiple of 128"
)
LAYERS = flags.DEFINE_integer("layers", 10, "layers of the target", lower_bound=5)
DRAFT_LAYERS = flags.DEFINE_integer("draft_layers", 1, "layers of the draft", lower_bound=1)
TARGET_STEPS = flags.DEFINE_integer(
    "target_steps", 1600, "training steps of the target, of 2048 tokens each", lower_bound=2
)
DRAFT_STEPS = flags.DEFINE_integer(
    "draft_steps", 8700, "training steps of the draft", lower_bound=LEAST_STEPS
)
ROLLOUTS = flags.DEFINE_integer(
    "rollouts", 4608, "sequences that the target generates to train the draft"
)
flags.register_validator(
    "rollouts", lambda count: count > 0 and count % BATCH == 0, f"it must be a multiple of {BATCH}"
)
CHECKPOINT_STEPS = flags.DEFINE_integer(
    "checkpoint_steps", 200, "steps between two checkpoints", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "seed of all random numbers")
# All that the results depend on.
SETTINGS = (
    DRAFT_KIND,
    VOCAB,
    HIDDEN,
    LAYERS,
    DRAFT_LAYERS,
    TARGET_STEPS,
    DRAFT_STEPS,
    ROLLOUTS,
    SEED,
)

POSITIONS = 2048
FLOAT32 = LayerForm("float32")
CONVOLUTION, SELECTOR = (
    BlockConvolution(kernel=2, group=16),
    CandidateSelector(rank=64, candidates=16),
)
MARKOV = MarkovHead(rank=64)
MEASURED_ROWS, MEASURED_TOKENS = 64, 257  # of the held-out text


def check_settings(out: Path) -> None:
    """Writes the settings of a directory's first run. Exits if they differ from those of this run."""
    file, now = out / "settings.json", {flag.name: flag.value for flag in SETTINGS}
    if not file.exists():
        write_json(file, now)
    if differing := [
        name for name, value in json.loads(file.read_text()).items() if now[name] != value
    ]:
        then = json.loads(file.read_text())
        changes = ", ".join(f"--{name} {now[name]} instead of {then[name]}" for name in differing)
        sys.exit(
            f"{file}: the stages of this directory have other settings: {changes}. Choose another --out"
        )


def make_decoder(layers: int) -> Decoder:
    attention = AttentionShape(heads=HIDDEN.value // 64, kv_heads=HIDDEN.value // 128, head_dim=64)
    rope = Rope(10000.0, attention.head_dim)
    mlp = DenseMlp(2 * HIDDEN.value)
    return Decoder(layers, HIDDEN.value, mlp, attention, rope, 1e-6, VOCAB.value, POSITIONS)


def make_draft_facts(target: Target, block: int, mask: int) -> Draft:
    """A draft that reads the target's second layer, one in the middle, and the last but one."""
    depth, layers = target.decoder.layers, DRAFT_LAYERS.value
    parts = {
        "dflash": {},
        "dflash2": {"convolution": CONVOLUTION, "heads": DraftHeads(selector=SELECTOR)},
        "dspark": {"heads": DraftHeads(predicts_next=True, markov=MARKOV)},
    }[DRAFT_KIND.value]
    target_layer_ids = (1, (depth - 1) // 2, depth - 2)
    return Draft(
        make_decoder(layers),
        block,
        mask,
        target_layer_ids,
        target.decoder.hidden,
        (None,) * layers,
        **parts,
    )


def round_as_stored(weights: Weights) -> Weights:
    """The weights as rounded in the checkpoint, because the later stages must use the target that will be served."""
    return {name: leaf.astype(jnp.bfloat16).astype(jnp.float32) for name, leaf in weights.items()}


def to_device(arrays: dict[str, np.ndarray]) -> Weights:
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def make_tokenizer(out: Path, texts: list[str]) -> Tokenizer:
    file, new = out / "tokenizer.json", out / "tokenizer.new"
    if not file.exists():
        train_tokenizer(texts, VOCAB.value).save(str(new))
        new.replace(file)
    return Tokenizer.from_file(str(file))


def make_target(
    out: Path, target: AbstractModel[CausalLM], stream: np.ndarray, tokenizer: Tokenizer
) -> Weights:
    """Trains the target and writes its checkpoint; returns the weights as stored."""

    def compute(checkpoint: Path) -> Weights:
        return train_target(
            target, stream, TARGET_STEPS.value, SEED.value, checkpoint, CHECKPOINT_STEPS.value
        )

    weights = to_device(run_stage(out / "target.safetensors", compute))
    save_target(out / "target", target.module.target, weights, target.recipes("target"), tokenizer)
    return round_as_stored(weights)


def make_draft(
    out: Path,
    draft: AbstractModel[DFlash],
    target: AbstractModel[CausalLM],
    target_weights: Weights,
    ids: np.ndarray,
) -> None:
    """Trains the draft on the target's text ids [S, T], phase by phase, and writes its checkpoint."""
    facts, layers = draft.module.draft, target.module.target.decoder.layers
    weights = init_weights(draft.shapes(), facts.decoder.layers, SEED.value + 2)
    # Once for all phases.
    outputs = cache(partial(run_target, target, target_weights, ids, facts.target_layer_ids))
    for index, phase in enumerate(plan_phases(DRAFT_STEPS.value)):
        given, seed = (ids, outputs, phase), SEED.value + 2 + index
        arguments = ((target, draft), target_weights, round_as_stored(weights), *given, seed)
        compute = partial(train_phase, *arguments, every=CHECKPOINT_STEPS.value)
        weights = to_device(run_stage(out / f"draft{index}.safetensors", compute))
    save_draft(out / "draft", facts, layers, weights, draft.recipes("draft"))


def print_held_out_loss(
    target: AbstractModel[CausalLM], weights: Weights, stream: np.ndarray
) -> None:
    rows = stream[: len(stream) // MEASURED_TOKENS * MEASURED_TOKENS].reshape(-1, MEASURED_TOKENS)[
        :MEASURED_ROWS
    ]
    print(
        f"held-out loss {float(next_token_loss(target, weights, jnp.asarray(rows))):.3f}",
        flush=True,
    )


def count_parameters(model: AbstractModel) -> int:
    return sum(shape.size for shape in model.shapes().values())


def main(_: list[str]) -> None:
    out = Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    check_settings(out)
    texts = read_split(held_out=False)
    tokenizer = make_tokenizer(out, texts)
    stream, held_out = (
        token_stream(tokenizer, part) for part in (texts, read_split(held_out=True))
    )
    characters = sum(map(len, texts)) / len(stream)
    print(
        f"{len(stream):,} training tokens, {len(held_out):,} held out, {characters:.2f} characters each"
    )

    sizes = Target(make_decoder(LAYERS.value), tied=True)
    target = AbstractModel(lambda: CausalLM(sizes, FLOAT32))
    print(f"target: {count_parameters(target):,} parameters", flush=True)
    weights = make_target(out, target, stream, tokenizer)
    print_held_out_loss(target, weights, held_out)

    def generate(_: Path) -> dict[str, np.ndarray]:
        return {"ids": roll_out(target, weights, stream, ROLLOUTS.value, SEED.value + 1)}

    ids = run_stage(out / "rollouts.safetensors", generate)["ids"]
    facts = make_draft_facts(
        sizes, plan_phases(DRAFT_STEPS.value)[-1].block, tokenizer.token_to_id(MASK)
    )
    draft = AbstractModel(lambda: DFlash(facts, FLOAT32))
    print(f"draft: {count_parameters(draft):,} parameters", flush=True)
    make_draft(out, draft, target, weights, ids)


if __name__ == "__main__":
    app.run(main)
