"""The programs with models whose outputs are known: no layers, a one-hot embedding and a chosen head."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec import structs

VOCAB, BLOCK, MASK = 16, 4, 15
BUCKET = "batch=1 length=16 k=3"


@pytest.fixture(scope="session")
def hand_made(small, make_rig):
    """A head [V, H] over one-hot hidden states → the programs of a pair with that head, compiled once for all heads."""
    narrow = {"hidden": VOCAB, "vocab": VOCAB}
    target = structs.replace(small.target, decoder=structs.replace(small.target.decoder, **narrow))
    draft = structs.replace(
        small.draft,
        decoder=structs.replace(small.draft.decoder, **narrow),
        target_hidden=VOCAB,
        mask_token=MASK,
    )
    models = dataclasses.replace(small, target=target, draft=draft, weights={})
    rig = make_rig(models, "batch=1 length=16 k=3 prefill=4")
    weights = {
        one.name: (jnp.ones if "norm" in one.name else jnp.zeros)(one.shape) for one in models.programs.recipes()
    }
    weights["target.model.embed_tokens.weight"] = jnp.eye(VOCAB)
    return lambda head: rig.with_weights({**weights, "target.lm_head.weight": jnp.asarray(head, jnp.float32)})


@pytest.fixture(scope="session")
def counting(hand_made):
    """The target counts up. The draft sees only masks, so it drafts the token after the mask: 0."""
    return hand_made(np.roll(np.eye(VOCAB), 1, axis=0))


@pytest.fixture(scope="session")
def constant(hand_made):
    """Both models always choose 5."""
    return hand_made(np.eye(VOCAB)[5][:, None] * np.ones(VOCAB))


def decode_round(rig, arrays):
    arrays = rig.run(f"draft {BUCKET}", arrays)
    return rig.run(f"verify {BUCKET}", arrays, active=[True])


def test_prefill_sets_length_and_anchor(counting):
    arrays = counting.prefill(counting.empty(), 0, [3, 9, 4, 1, 6], width=4)
    assert arrays["lengths"].tolist() == [5]
    assert arrays["anchors"].tolist() == arrays["first"].tolist() == [7]


def test_rejected_draft_commits_the_targets_own_token(counting):
    arrays = decode_round(counting, counting.prefill(counting.empty(), 0, [5, 6], width=4))
    assert arrays["block"].tolist() == [[7, 0, 0, 0]]
    assert arrays["verdict"].tolist() == [[0, 0, 0, 0, 8, 1, 1, 1]]
    assert arrays["starts"].tolist() == [2]
    assert arrays["lengths"].tolist() == [3]
    assert arrays["anchors"].tolist() == [8]


def test_one_accepted_token_advances_by_two(counting):
    arrays = decode_round(counting, counting.prefill(counting.empty(), 0, [14], width=4))
    assert arrays["block"].tolist() == [[15, 0, 0, 0]]
    assert arrays["verdict"].tolist() == [[1, 0, 0, 0, 0, 1, 1, 1]]
    assert arrays["lengths"].tolist() == [3]
    assert arrays["anchors"].tolist() == [1]


def test_features_are_those_of_the_verified_tokens(counting):
    arrays = decode_round(counting, counting.prefill(counting.empty(), 0, [5, 6], width=4))
    assert arrays["features"].argmax(-1).tolist() == [[7, 0, 0, 0]]


def test_agreeing_draft_is_accepted_whole_in_every_round(constant):
    arrays = constant.prefill(constant.empty(), 0, [2], width=4)
    for length in (1, 5, 9):
        arrays = decode_round(constant, arrays)
        assert arrays["starts"].tolist() == [length]
        assert arrays["verdict"].tolist() == [[3, 5, 5, 5, 5, 5, 5, 5]]
        assert arrays["lengths"].tolist() == [length + BLOCK]
        assert arrays["anchors"].tolist() == [5]
