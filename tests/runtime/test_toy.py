"""The toy device detects wrong calls, so that a wrong loop cannot pass on it."""

from typing import Any

import numpy as np
import pytest

from dflash_aot.cache.grid import Bucket, Chunk
from tests.runtime.toy import Misuse, ToyArray, ToyBundle, ToyEngine, ToyState, always, continue_alone, guess


def test_toy_texts_by_hand():
    assert continue_alone([5], 3) == [6, 18, 72]  # 1 + 5, 6 + 2·6, 18 + 3·18
    assert guess([5], 2, 4)[:3] == [6, 18, 73]  # two are right, the third is not
    engine = ToyEngine(right=always(1), k=3)
    request = engine.submit([5], 5)
    engine.run()
    # The first token is the prefill's, each round brings one right guess and one of the target's own.
    assert (request.output.token_ids, request.accepted[:2]) == ([6, 18, 72, 69, 26], [1, 1])


def place(*values: object) -> list[ToyArray]:
    return [ToyArray(np.array(value)) for value in values]


def tables(*slots: int) -> list[ToyArray]:
    """The page tables of slots, each with pages of its own."""
    return place([[1 + 4 * slot + entry for entry in range(4)] for slot in slots])


def prefilled() -> tuple[ToyBundle, ToyState, Bucket, Any]:
    """A toy without a loop: three tokens in slot 0, and their features, not written yet."""
    engine = ToyEngine("batch=1,2 length=16 k=0,3 prefill=4", k=3)
    bundle, state = engine.bundle, engine.state
    arguments = place([[5, 6, 7, 0]], [0], [0], [3], [True])
    features, _ = bundle.prefill(Chunk(4, 16))(state, *tables(0), *arguments)
    return bundle, state, Bucket(1, 16, 3), features


def draft(bundle: ToyBundle, state: ToyState) -> Any:
    (block,) = bundle.draft(Bucket(1, 16, 3))(state, *tables(0), *place([False], [False]))
    return block


def test_toy_detects_wrong_calls():
    """Reads of what was never written, positions outside the bucket or its pages, wrong tables, spent state."""
    bundle, state, bucket, features = prefilled()
    single = bundle.verify(Bucket(1, 16, 0))
    with pytest.raises(Misuse, match="has read what was never written"):
        bundle.verify(bucket)(state, *tables(0), draft(bundle, state), *place([True]))
    for table, flaw in (([[1, 2]], "have the shape"), ([[1, 9, 0, 0]], "do not exist"), ([[2, 2, 0, 0]], "twice")):
        state.reset()
        with pytest.raises(Misuse, match=flaw):
            single(state, *place(table, [True]))
    state.reset()
    state.slots[0].length = 16
    with pytest.raises(Misuse, match="1 positions behind 16 are not in"):
        single(state, *tables(0), *place([True]))
    state.reset()
    state.slots[0].length = 7
    with pytest.raises(Misuse, match="4 positions behind 7 have no page"):
        bundle.verify(bucket)(state, *place([[1, 2, 0, 0]], [[0] * 4], [True]))
    with pytest.raises(Misuse, match="that a failed call has spent"):
        draft(bundle, state)
    state.reset()
    with pytest.raises(Misuse, match="array of the host's"):
        bundle.kv_write(1, 4)(state, *tables(0), features, np.array([0]))
    with pytest.raises(Misuse, match="was not sent"):
        np.asarray(features)
