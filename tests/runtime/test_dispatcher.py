"""Sampling state: what is written to the device for which parameters, seen in the toy's `admit` calls."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.cache.sampling_state import NEUTRAL_SAMPLING, SAMPLING_COLUMNS
from dflash_aot.runtime.dispatcher import SamplingStateWriter, split_seed
from dflash_aot.runtime.requests.request import Request
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.scheduler import RunningRequest
from tests.runtime.toy import VOCAB, SlotSampling, ToyArray, ToyEngine, ToyState

PROMPT = [7, 5, 5, 96]
ARGUMENTS = ("slots", "starts", "anchor", "sampling", "seeds", "bias", "prompted", "counts", "tops")


class Recorder:
    """An `admit` executable that records its arguments."""

    def __init__(self) -> None:
        self.calls: list[dict[str, np.ndarray]] = []
        self.placed: list[dict[str, ToyArray]] = []

    def __call__(self, state: ToyState, *arguments: ToyArray) -> tuple[()]:
        self.placed.append(dict(zip(ARGUMENTS, arguments, strict=True)))
        self.calls.append({name: array.values for name, array in self.placed[-1].items()})
        return ()


def row(sampled: bool = True, **params: object) -> RunningRequest:
    request = Request(PROMPT, SamplingParams(**params), 9, frozenset(), None, lambda delta: None)  # type: ignore[arg-type]
    return RunningRequest(request, mode="sample" if sampled else "greedy")


def admit(*rows: RunningRequest) -> Recorder:
    """Writes each sampling state to slot 3."""
    recorder, state = Recorder(), ToyEngine().state
    admission = SamplingStateWriter(lambda: recorder, state, VOCAB)  # type: ignore[arg-type]
    for one in rows:
        admission.write(one, 3)
    return recorder


def admitted(**params: object) -> dict[str, np.ndarray]:
    return admit(row(**params)).calls[0]


# -- seeds


@pytest.mark.parametrize(
    ("seed", "halves"),
    [
        (0, (0, 0)),
        (1, (0, 1)),
        (1 << 32, (1, 0)),
        ((1 << 31) - 1, (0, 2147483647)),
        (1 << 31, (0, -2147483648)),
        ((1 << 32) - 1, (0, -1)),
        (-1, (-1, -1)),
        (-(1 << 63), (-2147483648, 0)),
        ((1 << 63) - 1, (2147483647, -1)),
        ((1 << 64) - 1, (-1, -1)),
    ],
)
def test_seed_is_split_into_high_and_low_half(seed, halves):
    split = split_seed(seed)
    assert (split.dtype, split.shape) == (np.int32, (1, 2))
    assert tuple(split[0].tolist()) == halves


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


def test_sampling_state_has_the_declared_shapes():
    shapes = {name: (values.dtype.name, values.shape) for name, values in admitted(temperature=1.0).items()}
    assert shapes == {
        "slots": ("int32", (1,)),
        "starts": ("int32", (1,)),
        "anchor": ("int32", (1,)),
        "sampling": ("float32", (1, len(SAMPLING_COLUMNS))),
        "seeds": ("int32", (1, 2)),
        "bias": ("float32", (1, VOCAB)),
        "prompted": ("bool", (1, VOCAB)),
        "counts": ("int32", (1, VOCAB)),
        "tops": ("int32", (1,)),
    }


def test_sampled_request_starts_at_the_last_prompt_token():
    call = admitted()
    assert [call[name].tolist() for name in ("slots", "starts", "anchor")] == [[3], [3], [96]]
    assert admit(row(sampled=False)).calls[0]["anchor"].tolist() == [-1]


def test_preempted_request_continues_behind_its_output_with_the_counts_of_its_tokens():
    running = row(frequency_penalty=1.0)
    running.request.take([9, 3, 9])
    (call,) = admit(RunningRequest(running.request, mode="sample")).calls
    assert [call[name].tolist() for name in ("starts", "anchor")] == [[len(PROMPT) + 2], [9]]
    assert {token: count for token, count in enumerate(call["counts"][0].tolist()) if count} == {9: 2, 3: 1}


def test_greedy_request_writes_neutral_values():
    call = admit(row(sampled=False)).calls[0]
    assert dict(zip(SAMPLING_COLUMNS, call["sampling"][0].tolist(), strict=True)) == NEUTRAL_SAMPLING
    assert not any(call[name].any() for name in ("bias", "prompted", "counts", "tops"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.5), ("top_k", 3), ("top_p", 0.25), ("min_p", 0.125), ("repetition_penalty", 1.5)]
    + [("presence_penalty", -0.5), ("frequency_penalty", 2.0)],
)
def test_every_parameter_has_its_column(name, value):
    columns = dict(zip(SAMPLING_COLUMNS, admitted(**{name: value})["sampling"][0].tolist(), strict=True))
    assert columns == {**NEUTRAL_SAMPLING, name: value}


def test_bias_is_written_to_its_tokens_only():
    biased, plain, empty = admit(row(logit_bias={0: -100.0, 96: 1.5}), row(), row(logit_bias={})).calls
    assert {token: value for token, value in enumerate(biased["bias"][0].tolist()) if value} == {0: -100.0, 96: 1.5}
    assert not plain["bias"].any()
    assert not empty["bias"].any()


def test_prompt_mask_is_written_for_repetition_penalty():
    penalised, plain = admit(row(repetition_penalty=1.1), row(presence_penalty=1.0)).calls
    assert np.flatnonzero(penalised["prompted"][0]).tolist() == [5, 7, 96]
    assert not plain["prompted"].any()


@pytest.mark.parametrize(("logprobs", "wanted"), [(None, 0), (0, 0), (1, 1), (20, 1)])
def test_likeliest_tokens_are_requested_with_logprobs(logprobs, wanted):
    assert admitted(logprobs=logprobs)["tops"].tolist() == [wanted]


def test_empty_arrays_are_placed_once():
    first, second, other = admit(row(), row(temperature=1.0), row(logit_bias={1: 1.0}, repetition_penalty=2.0)).placed
    assert other["counts"] is first["counts"]
    for name in ("bias", "prompted"):
        assert first[name] is second[name]
        assert other[name] is not first[name]


# -- the slot


def test_sampling_state_is_written_to_its_slot_only():
    engine = ToyEngine()
    admission = SamplingStateWriter(engine.bundle.admit, engine.state, VOCAB)  # type: ignore[arg-type]
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


@pytest.mark.parametrize(("top_k", "placed"), [(0, 0), (VOCAB - 1, VOCAB - 1), (VOCAB, 0), (10**400, 0)])
def test_top_k_of_the_vocabulary_is_no_limit(top_k, placed):
    (call,) = admit(row(temperature=1.0, top_k=top_k)).calls
    assert call["sampling"][0, SAMPLING_COLUMNS.index("top_k")] == placed
