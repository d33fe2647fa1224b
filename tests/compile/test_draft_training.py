"""The draft in training: its blocks are those of the engine's draft program."""

import importlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_aot.cache.grid import parse_grid
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
from tests.compile.conftest import Models, Rig, draft_parameters, target_parameters

TRAINING = Path(__file__).parents[2] / "examples/embedded_pair"
BLOCK, ANCHORS = 5, np.array([[3, 7, 11], [4, 9, 10]])
KINDS = {
    "DFlash": {},
    "DFlash2": {"convolution": BlockConvolution(2, 4), "selector": CandidateSelector(rank=8, candidates=6)},
}


def make_models(**parts):
    """A pair with random weights and several kv heads."""
    attention = AttentionShape(heads=4, kv_heads=2, head_dim=8)
    decoder = Decoder(2, 32, DenseMlp(48), attention, Rope(10_000.0, 8), 1e-6, vocab=64, positions=64)
    draft = Draft(decoder, BLOCK, 63, (0, 1), 32, (None, None), **parts)
    rng, weights = np.random.default_rng(5), {}
    both = {"target": target_parameters(Target(decoder, tied=False)), "draft": draft_parameters(draft)}
    for role, parameters in both.items():
        for name, spec in parameters.shapes().items():
            weights[f"{role}.{name}"] = jnp.asarray(rng.standard_normal(spec.shape, np.float32))
    return Models(Target(decoder, tied=False), weights, draft)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_in_training_draft_the_tokens_of_the_draft_program(monkeypatch, kind):
    monkeypatch.syspath_prepend(str(TRAINING))
    training = importlib.import_module("draft_training")
    models, ids = make_models(**KINDS[kind]), np.random.default_rng(1).integers(0, 60, (2, 16))
    features = np.stack([models.features(row) for row in ids])
    hidden = training.run_blocks(models.causal_lm, models.dflash, BLOCK, ids, features, ANCHORS)
    logits = np.asarray(models.dflash.logits(hidden, models.causal_lm)).reshape(2, 3, BLOCK, -1)
    hidden = hidden.reshape(2, 3, BLOCK, -1)
    rig = Rig(models, parse_grid(f"batch=1 length=32 k={BLOCK - 1} prefill=16", BLOCK))
    paths = set()
    for row, block in np.ndindex(ANCHORS.shape):
        at = ANCHORS[row, block]
        arrays = rig.prefill(rig.empty(), 0, ids[row, :at].tolist(), width=16)
        found = rig.run(f"draft batch=1 length=32 k={BLOCK - 1}", {**arrays, "anchors": ids[row, at : at + 1]})
        path = [int(ids[row, at])]
        for each, state in zip(logits[row, block, 1:], hidden[row, block, 1:], strict=True):
            scores = each
            if models.draft.selector:
                transitions = training.score_transitions(models.dflash, state[None, None], jnp.array([path[-1:]]))
                scores = np.where(each >= np.sort(each)[-6], each + np.asarray(transitions)[0, 0], -np.inf)
            path.append(int(scores.argmax()))
        assert np.asarray(found["block"])[0].tolist() == path, (row, block)
        paths.add(tuple(path[1:]))
    assert len(paths) > 4  # contexts decide
