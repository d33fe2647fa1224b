"""Inputs for an executable that anyone can make anew, from its signature alone: no checkpoint, no random generator.

Weights are noise around what keeps a model's numbers in their usual range. The cache is full of noise up to where the
call writes, and empty behind. What a request would say is said, so that every part of a program has something to do.
"""

import math
import zlib

import numpy as np

from dflash_aot.cache.sampling_state import NEUTRAL_SAMPLING, SAMPLING_COLUMNS
from dflash_aot.cache.signature import ArraySpec, Signature

VERSION = 1  # of what stands here: what was computed from other inputs cannot be compared
PERIOD = 1_048_583  # prime, and larger than any vocabulary: no two rows of a matrix are alike
WEIGHT, NORM, FEATURE = 0.05, 0.2, 1.0
SAMPLED = {**NEUTRAL_SAMPLING, "temperature": 0.9, "top_k": 50.0, "top_p": 0.9, "repetition_penalty": 1.1}
STRIDE = 7919  # from token to token
KV = ("target_k", "target_v", "draft_k", "draft_v")


def make_weight(array: ArraySpec) -> np.ndarray:
    """A weight argument, whole."""
    if array.dtype == "bool":
        return np.ones(array.shape, np.bool_)
    if array.dtype == "int32":  # offsets into a vocabulary: none
        return np.zeros(array.shape, np.int32)
    values = _fill_with_noise(array, NORM if "norm" in array.name else WEIGHT)
    return values + values.dtype.type(1) if "norm" in array.name else values


def make_state(array: ArraySpec, signature: Signature, vocab: int) -> np.ndarray:
    """An array of the state before the call."""
    if array.name in KV:
        values = _fill_with_noise(array, FEATURE)
        values[:, :, :, _start(signature) :] = 0
        return values
    slots = np.arange(array.shape[0], dtype=np.int32)
    match array.name:
        case "lengths":
            return np.full(array.shape, _start(signature), np.int32)
        case "anchors":
            return _make_tokens(array, vocab)
        case "sampling":
            return np.stack([_make_choice(slot) for slot in range(array.shape[0])])
        case "seeds":
            return np.stack([slots, slots + STRIDE], axis=1)
        case "tops":
            return (slots % 2 == 0).astype(np.int32)
        case "prompted":
            return (np.arange(array.shape[1]) + slots[:, None]) % 97 == 0
        case "bias":
            return _fill_with_noise(array, 1.0)
        case "counts":
            return np.zeros(array.shape, np.int32)
    raise AssertionError(f"{array.name}: state that nothing is known of")


def make_argument(array: ArraySpec, signature: Signature, vocab: int) -> np.ndarray:
    """An argument of the call."""
    rows = np.arange(array.shape[0], dtype=np.int32)
    match array.name:
        case "tokens" | "block":
            return _make_tokens(array, vocab)
        case "anchor":
            return vocab - 1 - _make_tokens(array, vocab)
        case "slots" | "source":
            return rows
        case "destination":
            return rows + 1
        case "starts":  # of an admission, another length than there is
            return np.full(array.shape, _start(signature) + (signature.program == "admit"), np.int32)
        case "counts":
            return np.full(array.shape, signature.bucket["prefill"], np.int32)
        case "active":
            return np.ones(array.shape, np.bool_)
        case "count":  # of rounds: what the first one rounds differently the next ones magnify
            return np.ones(array.shape, np.int32)
        case "left":
            return np.full(array.shape, signature.bucket["length"], np.int32)
        case "ends":
            return np.full(array.shape, -1, np.int32)
        case "features":
            return _fill_with_noise(array, FEATURE)
    # What an admission writes over the first slot is what the second one has.
    _, *shape = array.shape
    return make_state(ArraySpec(array.name.removeprefix("slot_"), (2, *shape), array.dtype), signature, vocab)[1:]


def _start(signature: Signature) -> int:
    """Where the call writes: in the middle of its bucket, or near the beginning where there is none."""
    bucket = signature.bucket
    width = bucket.get("prefill", bucket.get("k", 0) + 1)
    return max(0, bucket.get("length", 8) - width) // 2


def _make_choice(slot: int) -> np.ndarray:
    """Every other slot draws, the first one too."""
    columns = NEUTRAL_SAMPLING if slot % 2 else SAMPLED
    return np.array([columns[name] for name in SAMPLING_COLUMNS], np.float32)


def _make_tokens(array: ArraySpec, vocab: int) -> np.ndarray:
    count = math.prod(array.shape)
    return (np.arange(1, count + 1) * STRIDE % vocab).astype(np.int32).reshape(array.shape)


def _fill_with_noise(array: ArraySpec, scale: float) -> np.ndarray:
    """Numbers in [-scale, scale), other ones for every name."""
    noise = (_mix(np.arange(PERIOD, dtype=np.uint64)) >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - 1
    begin = zlib.crc32(array.name.encode()) % PERIOD
    values = (np.roll(noise, -begin) * np.float32(scale)).astype(array.dtype)
    return np.resize(values, array.shape)


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Spreads uint64 as SplitMix64 does (Steele, Lea, Flood 2014); whole numbers are the same everywhere."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
