"""The draft in training: its blocks are those of the engine's draft program."""

import importlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec import structs

from dflash_aot.cache.grid import parse_grid
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
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.dflash import DFlash
from dflash_aot.compile.models.layers import LayerForm
from dflash_aot.compile.models.parameters import AbstractModel
from tests.compile.conftest import Models, Rig, draft_parameters, target_parameters

TRAINING = Path(__file__).parents[2] / "examples/embedded_pair"
BLOCK, ANCHORS = 5, np.array([[3, 7, 11], [4, 9, 10]])
KINDS = {
    "DFlash": {},
    "DFlash2": {
        "convolution": BlockConvolution(2, 4),
        "heads": DraftHeads(selector=CandidateSelector(rank=8, candidates=6)),
    },
    "DSpark": {"heads": DraftHeads(predicts_next=True, markov=MarkovHead(rank=8))},
}


def make_models(tied=False, **parts):
    """A pair with random weights and several kv heads; the target has a layer more than the draft."""
    attention = AttentionShape(heads=4, kv_heads=2, head_dim=8)
    decoder = Decoder(2, 32, DenseMlp(48), attention, Rope(10_000.0, 8), 1e-6, vocab=64, positions=64)
    target = Target(structs.replace(decoder, layers=3), tied)
    draft = Draft(decoder, BLOCK, 63, (0, 1), 32, (None, None), **parts)
    rng, weights = np.random.default_rng(5), {}
    both = {"target": target_parameters(target), "draft": draft_parameters(draft)}
    for role, parameters in both.items():
        for name, spec in parameters.shapes().items():
            weights[f"{role}.{name}"] = jnp.asarray(rng.standard_normal(spec.shape, np.float32))
    return Models(target, weights, draft)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_in_training_equal_the_draft_program(monkeypatch, kind):
    monkeypatch.syspath_prepend(str(TRAINING))
    training = importlib.import_module("draft_training")
    models, ids = make_models(**KINDS[kind]), np.random.default_rng(1).integers(0, 60, (2, 16))
    features = np.stack([models.features(row) for row in ids])
    hidden = training.run_blocks(models.causal_lm, models.dflash, BLOCK, ids, features, ANCHORS)
    logits = np.asarray(models.dflash.logits(hidden, models.causal_lm)).reshape(2, 3, BLOCK, -1)
    hidden = hidden.reshape(2, 3, BLOCK, -1)
    k = BLOCK - models.draft.heads.first_row
    rig = Rig(models, parse_grid(f"batch=1 length=32 k={k} prefill=16", models.draft.verified_block))
    paths = set()
    for row, block in np.ndindex(ANCHORS.shape):
        at = ANCHORS[row, block]
        arrays = rig.prefill(rig.empty(), 0, ids[row, :at].tolist(), width=16)
        found = rig.run(f"draft batch=1 length=32 k={k}", {**arrays, "anchors": ids[row, at : at + 1]})
        path = [int(ids[row, at])]
        heads = models.draft.heads
        for each, state in zip(*(part[row, block, heads.first_row :] for part in (logits, hidden)), strict=True):
            scores = each
            if heads.chains:
                transitions = training.score_transitions(models.dflash, state[None, None], jnp.array([path[-1:]]))
                likeliest = each >= np.sort(each)[-6] if heads.selector else True
                scores = np.where(likeliest, each + np.asarray(transitions)[0, 0], -np.inf)
            path.append(int(scores.argmax()))
        assert np.asarray(found["block"])[0].tolist() == path, (row, block)
        paths.add(tuple(path[1:]))
    assert len(paths) > 4  # contexts decide


@pytest.mark.parametrize("kind", ["DFlash2", "DSpark"])
def test_steps_lower_the_loss_of_a_readable_draft(monkeypatch, tmp_path, kind):
    monkeypatch.syspath_prepend(str(TRAINING))
    training, optimize, checkpoint = map(importlib.import_module, ("draft_training", "optimize", "checkpoint"))
    models, float32 = make_models(tied=True, **KINDS[kind]), LayerForm("float32")
    pair = (
        AbstractModel(lambda: CausalLM(models.target, float32)),
        AbstractModel(lambda: DFlash(models.draft, float32)),
    )
    fixed = {name.removeprefix("target."): leaf for name, leaf in models.weights.items() if name.startswith("target.")}
    ids = np.random.default_rng(1).integers(0, 60, (64, training.WIDTH))
    outputs = training.run_target(pair[0], fixed, ids, models.draft.target_layer_ids)
    phase = training.Phase(block=BLOCK, anchors=4, decay=4.0, sharpness=1.0, learning_rate=(1e-2, 1e-3), steps=20)
    before = optimize.init_weights(pair[1].shapes(), models.draft.decoder.layers, seed=1)
    after = training.train_phase(pair, fixed, before, ids, lambda: outputs, phase, 3, tmp_path / "state", 100)
    held_out = next(training.batches(phase, ids, *outputs, seed=4))
    first, last = (float(training.block_loss(pair, phase, weights, fixed, held_out)) for weights in (before, after))
    assert last < first - 0.2
    assert all((after[name] != before[name]).any() for name in after)

    checkpoint.save_draft(tmp_path / "draft", models.draft, 3, after, pair[1].recipes("draft"))
    read = read_draft(read_config(tmp_path / "draft"), models.target)
    assert (read, read.generation) == (models.draft, kind)
