"""The toy device detects wrong calls, so that a wrong loop cannot pass on it."""

from typing import Any

import numpy as np
import pytest

from dflash_aot.cache.grid import Bucket, Chunk
from tests.runtime.toy import (
    Fault,
    Misuse,
    ToyArray,
    ToyBundle,
    ToyEngine,
    ToyState,
    always,
    continue_alone,
    guess,
)


def test_toy_texts_by_hand():
    assert continue_alone([5], 3) == [6, 18, 72]  # 1 + 5, 6 + 2·6, 18 + 3·18
    assert guess([5], 2, 4)[:3] == [6, 18, 73]  # two are right, the third is not
    engine = ToyEngine(right=always(1), k=3)
    request = engine.submit([5], 5)
    engine.run()
    # The first token is the prefill's, each round brings one right guess and one of the target's own.
    assert (request.token_ids, request.accepted[:2]) == ([6, 18, 72, 69, 26], [1, 1])


def place(*values: object) -> list[ToyArray]:
    return [ToyArray(np.array(value)) for value in values]


def prefilled() -> tuple[ToyBundle, ToyState, Bucket, Any]:
    """A toy without a loop: three tokens in slot 0, and their features, not written yet."""
    engine = ToyEngine("batch=1,2 length=16 k=0,3 prefill=4", k=3)
    bundle, state = engine.bundle, engine.state
    arguments = place([[5, 6, 7, 0]], [0], [0], [3], [True])
    features, _ = bundle.prefill(Chunk(4, 16))(state, *arguments)
    return bundle, state, Bucket(1, 16, 3), features


def test_toy_detects_an_unwritten_draft_context():
    bundle, state, bucket, features = prefilled()
    (block,) = bundle.draft(bucket)(state, *place([False]))
    with pytest.raises(Misuse, match="has read what was never written"):
        bundle.verify(bucket)(state, block, *place([True]))
    bundle, state, bucket, features = prefilled()
    bundle.kv_write(1, 4)(state, features, *place([0], [0]))
    (block,) = bundle.draft(bucket)(state, *place([False]))
    bundle.verify(bucket)(state, block, *place([True]))


def test_toy_detects_misplaced_features():
    bundle, state, _, features = prefilled()
    for slot, start in ((1, 0), (0, 1)):
        with pytest.raises(Misuse, match="are written as those of"):
            bundle.kv_write(1, 4)(state, features, *place([slot], [start]))
        state.reset()


def test_toy_detects_a_gap_between_chunks():
    bundle, state, *_ = prefilled()
    with pytest.raises(Misuse, match="starts at 4, and the one before it ended at 3"):
        bundle.prefill(Chunk(4, 16))(state, *place([[8, 0, 0, 0]], [0], [4], [1], [True]))


def test_toy_detects_a_round_beyond_its_bucket():
    bundle, state, *_ = prefilled()
    state.slots[0].length = 17
    state.slots[0].target[:17] = range(17)
    with pytest.raises(Misuse, match="1 positions behind 17 are not in"):
        bundle.verify(Bucket(1, 16, 0))(state, *place([True]))
    with pytest.raises(Misuse, match="no verification for"):
        bundle.verify(Bucket(1, 32, 0))
    state.reset()
    state.slots[1].length = 17  # it rests, and its block would be written over what stands before it
    with pytest.raises(Misuse, match="would slide back"):
        bundle.verify(Bucket(2, 16, 3))(state, *place([[0] * 4] * 2, [False, False]))


def test_toy_detects_a_missing_sampling_state():
    bundle, state, *_ = prefilled()
    with pytest.raises(Misuse, match="without a sampling state"):
        bundle.verify(Bucket(1, 16, 0), "sample")(state, *place([True]))


def test_toy_detects_spent_state_and_unsent_reads():
    bundle, state, _, features = prefilled()
    with pytest.raises(Misuse, match="array of the host's"):
        bundle.kv_write(1, 4)(state, features, np.array([0]), np.array([0]))
    with pytest.raises(Misuse, match="was not sent"):
        np.asarray(features)
    bundle.fail("draft")
    with pytest.raises(Fault):
        bundle.draft(Bucket(1, 16, 3))(state, *place([False]))
    with pytest.raises(Misuse, match="that a failed call has spent"):
        bundle.draft(Bucket(1, 16, 3))(state, *place([False]))
    state.reset()
    bundle.draft(Bucket(1, 16, 3))(state, *place([False]))
