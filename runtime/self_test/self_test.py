"""Self-test of executables: calls one with reproducible inputs, records its results and compares records."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dflash_aot.cache.bundle.manifest import SelfTest, SelfTestOutput
from dflash_aot.cache.devices import make_sharding
from dflash_aot.cache.self_test import INPUTS_VERSION
from dflash_aot.cache.signature import SAMPLED_PROGRAMS, ArraySpec, Signature
from dflash_aot.runtime.executables.executable import Executable
from dflash_aot.runtime.self_test.inputs import make_argument, make_state, make_weight

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
    """Calls each executable once, with test weights and test state on the devices."""

    def __init__(self, known: Mapping[str, ArraySpec], vocab: int, devices: Sequence[jax.Device]):
        self._known, self._vocab, self._devices = known, vocab, devices
        self._weights: dict[str, jax.Array] = {}

    def call(self, executable: Executable) -> SelfTest:
        """The record of the results. Raises ValueError for NaN or infinity."""
        outputs = (_record_output(one.name, one.values, one.before) for one in self.run(executable))
        return SelfTest(INPUTS_VERSION, tuple(outputs))

    def run(self, executable: Executable) -> list[Output]:
        """The results of a call: donated state, then results."""
        signature, donated = executable.signature, executable.signature.donated
        executable.bind(self._place_weights(signature))
        before = {name: make_state(self._known[name], signature, self._vocab) for name in signature.state}
        state = _State({name: self._to_device(self._known[name], values) for name, values in before.items()})
        pool_pages = self._known["target_k"].shape[1] - 1
        arguments = [
            self._to_device(one, make_argument(one, signature, self._vocab, pool_pages)) for one in signature.arguments
        ]
        results = executable(state, *arguments)
        outputs = [Output(name, np.asarray(state.arrays[name]), before[name]) for name in donated]
        for array, result in zip(signature.results, results, strict=True):
            outputs += [Output(name, values) for name, values in _read_result(signature, array.name, result)]
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


class _State:
    """State arrays by name, for one call."""

    def __init__(self, arrays: dict[str, jax.Array]):
        self.arrays = arrays

    def read(self, names: Sequence[str]) -> list[jax.Array]:
        return [self.arrays[name] for name in names]

    def replace(self, names: Sequence[str], outputs: Sequence[jax.Array]) -> None:
        self.arrays.update(zip(names, outputs, strict=False))


def _read_result(signature: Signature, name: str, result: jax.Array) -> list[tuple[str, np.ndarray]]:
    """The named parts of a result: a sampled verdict ends with log-probabilities, stored as int32."""
    values = np.asarray(result)
    if signature.program not in SAMPLED_PROGRAMS or name != "verdict":
        return [(name, values)]
    chosen = 2 * signature.bucket["k"] + 2
    logprobs = np.ascontiguousarray(values[:, chosen:]).view(np.float32)
    return [(name, values[:, :chosen]), ("logprobs", logprobs)]


def _record_output(name: str, values: np.ndarray, before: np.ndarray | None = None) -> SelfTestOutput:
    """Some values of an output and their mean; of a state array, only the values that the call changed."""
    flat = values.ravel()
    if before is not None:
        flat = flat[flat != before.ravel()]
    numbers = flat.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} holds NaN or infinity")
    samples = np.linspace(0, numbers.size - 1, min(SAMPLES, numbers.size)).astype(int)
    mean = float(np.abs(numbers).mean()) if numbers.size else 0.0
    return SelfTestOutput(name, str(values.dtype), numbers.size, tuple(numbers[samples].tolist()), mean)


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


def _compare_numbers(pairs: Iterable[tuple[SelfTestOutput, SelfTestOutput]], tolerance: float) -> Iterator[str]:
    for golden, found in pairs:
        if _is_whole(golden):
            continue
        if abs(golden.changed - found.changed) > tolerance * golden.changed:
            yield f"{golden.name}: {found.changed} numbers were written, recorded are {golden.changed}"
        elif abs(golden.mean - found.mean) > tolerance * golden.mean:
            yield f"{golden.name}: the mean is {found.mean:.6g}, recorded is {golden.mean:.6g}"
        elif golden.changed == found.changed:
            yield from _compare_values(golden, found, tolerance)


def _compare_values(golden: SelfTestOutput, found: SelfTestOutput, tolerance: float) -> Iterator[str]:
    for number, (one, other) in enumerate(zip(golden.values, found.values, strict=True)):
        if abs(one - other) > tolerance * max(abs(one), golden.mean):
            yield f"{golden.name}: value {number} of {len(golden.values)} is {other:.6g}, recorded is {one:.6g}"
            return


def _compare_tokens(pairs: Sequence[tuple[SelfTestOutput, SelfTestOutput]], share: float) -> Iterator[str]:
    """Whole numbers of all outputs together, because a token appears in several outputs."""
    alike = total = 0
    first = ""
    for golden, found in pairs:
        if len(golden.values) != len(found.values):
            yield f"{golden.name}: {found.changed} numbers were written, recorded are {golden.changed}"
            return
        for one, other in zip(golden.values, found.values, strict=True):
            total, alike = total + 1, alike + (one == other)
            first = first or f"{golden.name} is {other:.0f}, recorded is {one:.0f}" * (one != other)
    if alike < share * total:
        yield f"{total - alike} of {total} whole numbers differ, the first: {first}"


def _is_whole(output: SelfTestOutput) -> bool:
    return output.dtype in ("int32", "bool")
