"""Self-test of executables: calls one with reproducible inputs, records its results and compares records."""

import functools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import msgspec
import numpy as np

from dflash_aot.cache.arrays import FLOAT, RECURRENT_STATE, RING_STATE, ArraySpec
from dflash_aot.cache.bundle.manifest import SelfTest, SelfTestOutput
from dflash_aot.cache.bundle.self_test import INPUTS_VERSION
from dflash_aot.cache.devices import ignore_jax_switches, make_sharding
from dflash_aot.cache.sampling_state import NEUTRAL_SAMPLING, SAMPLING_COLUMNS
from dflash_aot.cache.signature import COPY, Signature
from dflash_aot.cache.weight_recipe import SCALE_SUFFIX
from dflash_aot.runtime.executables.executable import Executable, StateArrays

# -- inputs: reproducible arguments of an executable, from its signature alone, without checkpoint or generator
#
# Weights are noise that keeps a model's numbers in their usual range. The kv cache holds noise before the position
# where the call writes, and zeros from there on. Sampling parameters are set, so that every part of a program does
# something.
#
# A change here changes `cache.bundle.self_test.INPUTS_VERSION`.

PERIOD = 1_048_583  # a prime larger than any vocabulary, so that no two rows of a matrix are equal
WEIGHT = 0.05
NORM = 0.2
FEATURE = 1.0
FACTORS = ("layer_scalar", "router.scale", "per_expert_scale")  # of Gemma 4, near 1 as its norms
# Of a table of transitions of rank 1: with sqrt(6) and any rank, transitions are twice as wide as logits.
CODE = 2.45
SAMPLED = {
    **NEUTRAL_SAMPLING,
    "temperature": 0.9,
    "top_k": 50.0,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
}
STRIDE = 7919  # between consecutive tokens
MAX_POOL_PAGES = 1 << 30
KV = ("target_k", "target_v", "draft_k", "draft_v")


def make_weight(array: ArraySpec) -> np.ndarray:
    """A weight, not split between devices."""
    if array.dtype == "bool":
        return np.ones(array.shape, np.bool_)
    if array.dtype == "int32":  # offsets into a vocabulary
        return np.zeros(array.shape, np.int32)
    if array.dtype == "int8":
        return np.rint(_fill_with_noise(msgspec.structs.replace(array, dtype=FLOAT), 127)).astype(
            np.int8
        )
    if array.name.endswith(FACTORS):
        return _fill_around_one(array)
    if array.name.endswith(SCALE_SUFFIX):
        return np.full(array.shape, WEIGHT / 127, np.float32)
    if array.name.endswith("_codebook") or ".markov_w" in array.name:
        return _fill_with_noise(array, CODE / math.sqrt(math.sqrt(array.shape[-1])))
    if "norm" in array.name or array.name.endswith("base_kernel"):
        return _fill_around_one(array)
    return _fill_with_noise(array, WEIGHT)


def _fill_around_one(array: ArraySpec) -> np.ndarray:
    values = _fill_with_noise(array, NORM)
    return values + values.dtype.type(1)


def make_state(array: ArraySpec, signature: Signature, vocab: int) -> np.ndarray:
    """A state array before the call."""
    if array.name in KV:
        values = _fill_with_noise(array, FEATURE)
        rows = np.arange(array.shape[1])[:, None] - 1
        page = np.arange(array.shape[3])
        positions = rows % _count_row_pages(signature) * array.shape[3] + page
        return np.where(
            ((rows >= 0) & (positions < _start(signature)))[:, None, :, None], values, 0
        )
    slots = np.arange(array.shape[0], dtype=np.int32)
    match array.name:
        case name if name in (*RECURRENT_STATE, *RING_STATE):
            return _fill_with_noise(array, FEATURE)
        case "lengths":
            return np.full(array.shape, _start(signature), np.int32)
        case "anchors":
            return _make_tokens(array, vocab)
        case "sampling":
            return np.stack([_make_sampling(slot) for slot in range(array.shape[0])])
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
    raise AssertionError(f"{array.name}: no test input for this state array")


def make_argument(
    array: ArraySpec, signature: Signature, vocab: int, pool_pages: int = MAX_POOL_PAGES
) -> np.ndarray:
    """An argument that is neither weight nor state. In a pool of `pool_pages`, rows share pages if they must."""
    rows = np.arange(array.shape[0], dtype=np.int32)
    match array.name:
        case "pages":
            owners = max(1, pool_pages // array.shape[1])
            return (
                1
                + rows[:, None] % owners * array.shape[1]
                + np.arange(array.shape[1], dtype=np.int32)
            )
        case "chunk_pages":  # those of the row after the others
            batch = signature.bucket["batch"]
            owners = max(1, pool_pages // array.shape[1])
            return (
                1
                + batch % owners * array.shape[1]
                + np.arange(array.shape[1], dtype=np.int32)[None]
            )
        case "tokens" | "next_tokens" | "block":
            return _make_tokens(array, vocab)
        case "anchor":
            return vocab - 1 - _make_tokens(array, vocab)
        case "slots" | "source":
            return rows
        case "destination" | "source_page" | "index":
            return rows + 1
        case "destination_page":
            return rows + 2
        case "chunk_starts":
            return np.full(array.shape, _start(signature), np.int32)
        case "starts":  # a call that writes no kv sets another length than the state has
            sets_length = all(one.name != "pages" for one in signature.arguments)
            return np.full(array.shape, _start(signature) + sets_length, np.int32)
        case "counts" | "chunk_counts":
            return np.full(array.shape, signature.bucket["prefill"], np.int32)
        case "active" if "prefill" in signature.bucket:
            return rows > 0  # the chunk has the first slot
        case "active" | "gives_first" | "sampled" | "penalised":
            return np.ones(array.shape, np.bool_)
        case "stop_early":
            return np.zeros(array.shape, np.bool_)
        case "length":  # another one than the state has
            return np.full(array.shape, _start(signature) + 2, np.int32)
        case "count":  # of rounds: later rounds would magnify differences of the first
            return np.ones(array.shape, np.int32)
        case "left":
            return np.full(array.shape, signature.bucket["length"], np.int32)
        case "ends":
            return np.full(array.shape, -1, np.int32)
        case name if name == "features" or name.endswith(COPY):
            return _fill_with_noise(array, FEATURE)
        case "allowed":  # every other token
            return np.full(array.shape, 0x55555555, np.int32)
    # `admit` writes into the first slot what the second slot holds.
    _, *shape = array.shape
    return make_state(
        ArraySpec(array.name.removeprefix("slot_"), (2, *shape), array.dtype), signature, vocab
    )[1:]


def list_calls(signature: Signature, slots: int) -> list[Mapping[str, int]]:
    """The calls that test an executable: of each the arguments that differ from `make_argument`.

    All executables are called once, except `move` with saved states. Its first call restores a state to slot 0, its
    second call copies that slot to the next slot, or saves its state where there is only one slot.
    """
    if all(one.name != "source_page" for one in signature.arguments):
        return [{}]
    restored = {"source": slots, "destination": 0}
    return [restored, {"source_page": 2, "destination_page": 0}]


def _count_row_pages(signature: Signature) -> int:
    """Pages of a row; 1 for a program that copies pages without a table."""
    return next((one.shape[1] for one in signature.arguments if one.name == "pages"), 1)


def _start(signature: Signature) -> int:
    """The position where the call writes: the middle of its bucket, or near the beginning without a bucket."""
    bucket = signature.bucket
    width = bucket.get("prefill", bucket.get("k", 0) + 1)
    return max(0, bucket.get("length", 8) - width) // 2


def _make_sampling(slot: int) -> np.ndarray:
    """Sampling parameters: even slots sample, odd slots are greedy."""
    columns = NEUTRAL_SAMPLING if slot % 2 else SAMPLED
    return np.array([columns[name] for name in SAMPLING_COLUMNS], np.float32)


def _make_tokens(array: ArraySpec, vocab: int) -> np.ndarray:
    count = math.prod(array.shape)
    return (np.arange(1, count + 1) * STRIDE % vocab).astype(np.int32).reshape(array.shape)


def _fill_with_noise(array: ArraySpec, scale: float) -> np.ndarray:
    """Numbers in [-scale, scale), different for every array name."""
    begin = zlib.crc32(array.name.encode()) % PERIOD
    count = min(math.prod(array.shape), PERIOD)
    values = np.take(_make_noise(), np.arange(begin, begin + count), mode="wrap") * np.float32(
        scale
    )
    return np.resize(values.astype(array.dtype), array.shape)


@functools.cache  # hashing takes longer than all else that makes an array
def _make_noise() -> np.ndarray:
    """PERIOD numbers in [-1, 1), which repeat in larger arrays."""
    return (_mix(np.arange(PERIOD, dtype=np.uint64)) >> np.uint64(40)).astype(
        np.float32
    ) / np.float32(2**23) - 1


def _mix(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea, Flood 2014): hashes uint64, with the same result on every machine."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


# -- calls, records and their comparison

SAMPLES = 16  # values recorded of each output, in addition to its mean
# By how much numbers may differ between two compilers or processors, as a share of the larger of number and mean.
# Rounded to bfloat16, numbers differ by a percent after some layers; then either of two almost equally likely tokens
# may be chosen.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
AGREEING_TOKENS = {"float32": 1.0, "bfloat16": 0.5}


class Output(NamedTuple):
    """One output of a call.

    Attributes:
        name: of the array.
        values: after the call.
        before: of a state array, its values before the call.
    """

    name: str
    values: np.ndarray
    before: np.ndarray | None = None


class SelfTestCaller:
    """Calls executables with test weights and test state on the devices."""

    def __init__(self, known: Mapping[str, ArraySpec], vocab: int, devices: Sequence[jax.Device]):
        self._known = known
        self._vocab = vocab
        self._devices = devices
        self._weights: dict[str, jax.Array] = {}

    def call(self, executable: Executable) -> SelfTest:
        """The record of the results. Raises ValueError for NaN or infinity."""
        outputs = (_record_output(one.name, one.values, one.before) for one in self.run(executable))
        return SelfTest(INPUTS_VERSION, tuple(outputs))

    @ignore_jax_switches()
    def run(self, executable: Executable) -> list[Output]:
        """The results of a call: donated state, then results."""
        signature = executable.signature
        donated = executable.signature.donated
        executable.bind(self._place_weights(signature))
        before = {
            name: make_state(self._known[name], signature, self._vocab) for name in signature.state
        }
        state = _State(
            {name: self._to_device(self._known[name], values) for name, values in before.items()}
        )
        pool_pages = self._known["target_k"].shape[1] - 1
        made = {
            one.name: make_argument(one, signature, self._vocab, pool_pages)
            for one in signature.arguments
        }
        results: Mapping[str, jax.Array] = {}
        for changes in list_calls(signature, self._known["lengths"].shape[0]):
            arguments = {
                one.name: self._to_device(
                    one,
                    np.full_like(made[one.name], changes[one.name])
                    if one.name in changes
                    else made[one.name],
                )
                for one in signature.arguments
            }
            results = executable(state, **arguments)
        outputs = [Output(name, np.asarray(state.arrays[name]), before[name]) for name in donated]
        for result_name, result in results.items():
            parts = _read_result(signature, result_name, result)
            outputs += [Output(name, values) for name, values in parts]
        return outputs

    def _place_weights(self, signature: Signature) -> dict[str, jax.Array]:
        """Keeps this executable's weights only: the next executable takes mostly the same weights, or none of them."""
        kept = {name: self._weights[name] for name in signature.weights if name in self._weights}
        self._weights = kept
        for name in signature.weights:
            if name not in kept:
                kept[name] = self._to_device(self._known[name], make_weight(self._known[name]))
        return kept

    def _to_device(self, array: ArraySpec, values: np.ndarray) -> jax.Array:
        return jax.device_put(values, make_sharding(array.sharding, self._devices))


class _State(StateArrays):
    """State arrays by name, for one call."""

    def __init__(self, arrays: dict[str, jax.Array]):
        self.arrays = arrays

    def read(self, names: Sequence[str]) -> list[jax.Array]:
        return [self.arrays[name] for name in names]

    def replace(self, names: Sequence[str], outputs: Sequence[jax.Array]) -> None:
        self.arrays.update(zip(names, outputs, strict=False))


def _read_result(
    signature: Signature, name: str, result: jax.Array
) -> list[tuple[str, np.ndarray]]:
    """The named parts of a result: a sampled verdict ends with log-probabilities, stored as int32."""
    values = np.asarray(result)
    if name != "verdict":
        return [(name, values)]
    chosen = 2 * signature.bucket["k"] + 2
    if values.shape[1] == chosen:
        return [(name, values)]
    logprobs = np.ascontiguousarray(values[:, chosen:]).view(np.float32)
    return [(name, values[:, :chosen]), ("logprobs", logprobs)]


def _record_output(
    name: str, values: np.ndarray, before: np.ndarray | None = None
) -> SelfTestOutput:
    """Some values of an output and their mean; of a state array, only the values that the call changed."""
    flat = values.ravel()
    if before is not None:
        flat = flat[flat != before.ravel()]
    numbers = flat.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} holds NaN or infinity")
    samples = np.linspace(0, numbers.size - 1, min(SAMPLES, numbers.size)).astype(int)
    mean = float(np.abs(numbers).mean()) if numbers.size else 0.0
    return SelfTestOutput(
        name, str(values.dtype), numbers.size, tuple(numbers[samples].tolist()), mean
    )


def find_deviations(golden: SelfTest, found: SelfTest, dtype: str) -> list[str]:
    """Differences between two records of an executable, output by output; [] if they agree as far as `dtype` allows."""
    if (outputs := _name_outputs(found)) != (recorded := _name_outputs(golden)):
        return [f"outputs are {outputs}, recorded are {recorded}"]
    pairs = list(zip(golden.outputs, found.outputs, strict=True))
    deviations = list(_compare_numbers(pairs, TOLERANCE[dtype]))
    tokens = [(one, other) for one, other in pairs if _is_whole(one)]
    if not deviations and tokens:
        deviations += _compare_tokens(tokens, AGREEING_TOKENS[dtype])
    return deviations


def _name_outputs(record: SelfTest) -> str:
    return ", ".join(f"{output.name} {output.dtype}" for output in record.outputs)


def _compare_numbers(
    pairs: Iterable[tuple[SelfTestOutput, SelfTestOutput]], tolerance: float
) -> Iterator[str]:
    for golden, found in pairs:
        if _is_whole(golden):
            continue
        if abs(golden.changed - found.changed) > tolerance * golden.changed:
            yield f"{golden.name}: {found.changed} numbers were written, recorded are {golden.changed}"
        elif abs(golden.mean - found.mean) > tolerance * golden.mean:
            yield f"{golden.name}: the mean is {found.mean:.6g}, recorded is {golden.mean:.6g}"
        elif golden.changed == found.changed:
            yield from _compare_values(golden, found, tolerance)


def _compare_values(
    golden: SelfTestOutput, found: SelfTestOutput, tolerance: float
) -> Iterator[str]:
    for number, (one, other) in enumerate(zip(golden.values, found.values, strict=True)):
        if abs(one - other) > tolerance * max(abs(one), golden.mean):
            yield f"{golden.name}: value {number} of {len(golden.values)} is {other:.6g}, recorded is {one:.6g}"
            return


def _compare_tokens(
    pairs: Sequence[tuple[SelfTestOutput, SelfTestOutput]], share: float
) -> Iterator[str]:
    """Whole numbers of all outputs together, because a token appears in several outputs."""
    alike = total = 0
    first = ""
    for golden, found in pairs:
        if len(golden.values) != len(found.values):
            yield f"{golden.name}: {found.changed} numbers were written, recorded are {golden.changed}"
            return
        for one, other in zip(golden.values, found.values, strict=True):
            total = total + 1
            alike = alike + (one == other)
            first = first or f"{golden.name} is {other:.0f}, recorded is {one:.0f}" * (one != other)
    if alike < share * total:
        yield f"{total - alike} of {total} whole numbers differ, the first: {first}"


def _is_whole(output: SelfTestOutput) -> bool:
    return output.dtype in ("int32", "bool")
