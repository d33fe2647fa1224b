"""The toy device detects wrong calls, so that a wrong loop cannot pass on it."""

from typing import Any

import numpy as np
import pytest

from dflash_aot.cache.signature import DRAFT, KV_WRITE, PREFILL, VERIFY
from tests.runtime.toy import Misuse, ToyArray, ToyBundle, ToyEngine, ToyState, always, continue_alone, guess


def test_toy_texts_by_hand():
    assert continue_alone([5], 3) == [6, 18, 72]  # 1 + 5, 6 + 2·6, 18 + 3·18
    assert guess([5], 2, 4)[:3] == [6, 18, 73]  # two are right, the third is not
    engine = ToyEngine(right=always(1), k=3)
    request = engine.submit([5], 5)
    engine.run()
    # The first token is the prefill's, each round brings one right guess and one of the target's own.
    assert (request.output.token_ids, request.accepted[:2]) == ([6, 18, 72, 69, 26], [1, 1])


SIZES = (1, 16, 3)
TABLE = [[1, 2, 3, 4]]


def place(**values: object) -> dict[str, ToyArray]:
    return {name: ToyArray(np.array(value)) for name, value in values.items()}


def prefilled() -> tuple[ToyBundle, ToyState, Any]:
    """A toy without a loop: three tokens in slot 0, and their features, not written yet."""
    engine = ToyEngine("batch=1,2 length=16 k=0,3 prefill=4", k=3)
    bundle, state = engine.bundle, engine.state
    arguments = place(pages=TABLE, tokens=[[5, 6, 7, 0]], slots=[0], starts=[0], counts=[3], gives_first=[True])
    features = bundle.find(PREFILL, (4, 16))(state, **arguments)["features"]
    return bundle, state, features


def draft(bundle: ToyBundle, state: ToyState) -> Any:
    return bundle.find(DRAFT, SIZES)(state, **place(pages=TABLE, sampled=[False], penalised=[False]))["block"]


def test_toy_detects_wrong_calls():
    """Reads of what was never written, positions outside the bucket or its pages, wrong tables, spent state."""
    bundle, state, features = prefilled()
    verify, single = (bundle.find(VERIFY, (1, 16, k), "greedy") for k in (3, 0))
    with pytest.raises(Misuse, match="has read what was never written"):
        verify(state, block=draft(bundle, state), **place(pages=TABLE, active=[True]))
    for table, flaw in (([[1, 2]], "have the shape"), ([[1, 9, 0, 0]], "do not exist"), ([[2, 2, 0, 0]], "twice")):
        state.reset()
        with pytest.raises(Misuse, match=flaw):
            single(state, **place(pages=table, active=[True]))
    state.reset()
    state.slots[0].length = 16
    with pytest.raises(Misuse, match="1 positions behind 16 are not in"):
        single(state, **place(pages=TABLE, active=[True]))
    state.reset()
    state.slots[0].length = 7
    with pytest.raises(Misuse, match="4 positions behind 7 have no page"):
        verify(state, **place(pages=[[1, 2, 0, 0]], block=[[0] * 4], active=[True]))
    with pytest.raises(Misuse, match="that a failed call has spent"):
        draft(bundle, state)
    state.reset()
    write = bundle.find(KV_WRITE, (1, 4))
    with pytest.raises(Misuse, match="is given a host array"):
        write(state, features=features, starts=np.array([0]), **place(pages=TABLE))
    with pytest.raises(Misuse, match="takes .*'starts'.*, not .*"):
        write(state, features=features, **place(pages=TABLE))
    with pytest.raises(Misuse, match="there is no draft of"):
        bundle.find(DRAFT, (3, 16, 3))
    with pytest.raises(Misuse, match="was not sent"):
        np.asarray(features)
