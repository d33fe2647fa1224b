"""Sampling state: what is written to the device for which parameters, in the toy's `admit` calls and in masks."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.cache.sampling_state import ALL_ALLOWED, MASK_BITS, NEUTRAL_SAMPLING, SAMPLING_COLUMNS
from dflash_aot.cache.signature import ADMIT, Program
from dflash_aot.runtime.dispatcher import SamplingStateWriter, forbid_tokens, split_seed
from dflash_aot.runtime.requests.request import Request
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.scheduler import RunningRequest
from tests.runtime.toy import VOCAB, SlotSampling, ToyArray, ToyEngine, ToyState

PROMPT = [7, 5, 5, 96]


class Recorder:
    """A bundle whose `admit` executable records its arguments, without "slot_" before their names."""

    def __init__(self) -> None:
        self.calls: list[dict[str, np.ndarray]] = []

    def find(self, program: Program) -> Callable[..., None]:
        assert program is ADMIT
        return self._record

    def _record(self, state: ToyState, **arguments: ToyArray) -> None:
        self.calls.append({name.removeprefix("slot_"): array.values for name, array in arguments.items()})


def row(sampled: bool = True, **params: object) -> RunningRequest:
    request = Request(PROMPT, SamplingParams(**params), 9, frozenset(), None, lambda delta: None)  # type: ignore[arg-type]
    return RunningRequest(request, mode="sample" if sampled else "greedy")


def admit(*rows: RunningRequest) -> Recorder:
    """Writes each sampling state to slot 3."""
    recorder, state = Recorder(), ToyEngine().state
    admission = SamplingStateWriter(recorder, state, VOCAB)  # type: ignore[arg-type]
    for one in rows:
        admission.write(one, 3)
    return recorder


def admitted(**params: object) -> dict[str, np.ndarray]:
    return admit(row(**params)).calls[0]


# -- seeds


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_split_seed_halves_rejoin_to_the_seed(seed):
    high, low = (int(half) & 0xFFFFFFFF for half in split_seed(seed)[0])
    assert high << 32 | low == seed % (1 << 64)


def test_request_without_seed_draws_one():
    seeds = {tuple(call["seeds"][0].tolist()) for call in admit(*(row(temperature=1.0) for _ in range(20))).calls}
    assert len(seeds) == 20
    assert len({high for high, _ in seeds}) > 1  # all 64 bits are drawn
    assert len({low for _, low in seeds}) > 1


# -- arrays on the device


def test_preempted_request_continues_after_its_output():
    running = row(frequency_penalty=1.0)
    running.request.take([9, 3, 9])
    (call,) = admit(RunningRequest(running.request, mode="sample")).calls
    assert [call[name].tolist() for name in ("starts", "anchor")] == [[len(PROMPT) + 2], [9]]
    assert {token: count for token, count in enumerate(call["counts"][0].tolist()) if count} == {9: 2, 3: 1}


def test_every_parameter_has_its_column():
    values = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5}
    for name, value in {**values, "presence_penalty": -0.5, "frequency_penalty": 2.0}.items():
        columns = dict(zip(SAMPLING_COLUMNS, admitted(**{name: value})["sampling"][0].tolist(), strict=True))
        assert columns == {**NEUTRAL_SAMPLING, name: value}


def test_prompt_mask_is_written_for_repetition_penalty():
    penalised, plain = admit(row(repetition_penalty=1.1), row(presence_penalty=1.0)).calls
    assert np.flatnonzero(penalised["prompted"][0]).tolist() == [5, 7, 96]
    assert not plain["prompted"].any()


def test_likeliest_tokens_are_requested_with_logprobs():
    assert [admitted(logprobs=asked)["tops"].tolist() for asked in (None, 0, 1, 20)] == [[0], [0], [1], [1]]


# -- the slot


def test_sampling_state_is_written_to_its_slot_only():
    engine = ToyEngine()
    admission = SamplingStateWriter(engine.bundle, engine.state, VOCAB)  # type: ignore[arg-type]
    slots = engine.state.slots
    slots[2].length, slots[2].anchor, slots[2].said = 3, 55, 9
    before = [replace(slot) for slot in slots]
    admission.write(row(temperature=0.5, seed=-2, repetition_penalty=2.0, logit_bias={4: -1.0, 9: 1.0}, logprobs=3), 2)
    assert slots[2].sampling == SlotSampling(0.5, (1 << 64) - 2, 0.0, 2.0, prompted=3, forced=9, tops=True)
    assert (slots[2].length, slots[2].anchor, slots[2].said) == (3, 96, 0)
    assert slots[:2] + slots[3:] == before[:2] + before[3:]
    admission.write(row(sampled=False), 2)
    assert slots[2].sampling is not None and slots[2].sampling.temperature == 0
    assert (slots[2].length, slots[2].anchor) == (3, 96)  # both stay


def test_top_k_of_the_vocabulary_is_no_limit():
    calls = admit(*(row(temperature=1.0, top_k=top_k) for top_k in (0, VOCAB - 1, VOCAB, 10**400))).calls
    column = SAMPLING_COLUMNS.index("top_k")
    assert [call["sampling"][0, column] for call in calls] == [0, VOCAB - 1, 0, 0]


def test_forbidden_tokens_lose_their_bits_unless_nothing_else_is_allowed():
    masks = np.full((2, 2), ALL_ALLOWED, np.int32)
    masks[1] = [0, 1 << 1]
    forbid_tokens(masks, [0, 31, MASK_BITS + 1])
    bits = (masks[:, :, None] >> np.arange(MASK_BITS) & 1).reshape(2, -1)
    assert np.flatnonzero(bits[0] == 0).tolist() == [0, 31, MASK_BITS + 1]
    assert np.flatnonzero(bits[1]).tolist() == [MASK_BITS + 1]
