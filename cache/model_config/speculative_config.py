"""vLLM's `speculative_config`, with the meaning it has in vLLM."""

import json
import reprlib
from typing import Any, Literal

import msgspec

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Draft

FLAG = "--speculative_config"
METHOD = "dflash"
BY_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
# (first, last, K): K of rounds of `first` to `last` requests; ascending.
KRanges = tuple[tuple[int, int, int], ...]
# The K of an engine: one K, a K chosen while serving, or K by requests in the round.
KChoice = int | Literal["auto"] | KRanges
# Keys that vLLM accepts too. They would change the computation, so that ignoring them would be wrong.
UNSUPPORTED_VLLM_KEYS = (
    "code_revision",
    "disable_by_batch_size",
    "disable_padded_drafter_batch",
    "enforce_eager",
    "max_model_len",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "quantization",
    "revision",
    "speculative_token_tree",
)


class SpeculativeConfig(msgspec.Struct, frozen=True):
    """The supported keys; None for a key that is not given.

    Attributes:
        method: "dflash".
        model: the draft checkpoint.
        num_speculative_tokens: K.
        draft_tensor_parallel_size: 1.
        num_speculative_tokens_per_batch_size: K by the number of requests in the round, see
            `check_k_ranges`.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    draft_tensor_parallel_size: int | None = None
    num_speculative_tokens_per_batch_size: KRanges | None = None


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Parses a JSON object. Raises BadInput for unknown and unsupported keys and values."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{FLAG} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{FLAG} holds a {type(values).__name__}, expected an object")
    known = SpeculativeConfig.__struct_fields__
    for key in values:
        if key in UNSUPPORTED_VLLM_KEYS:
            raise BadInput(f"{FLAG}: {key} is a key of vLLM that is not supported here: remove it")
        if key not in known:
            raise BadInput(f"{FLAG}: unknown key {key!r}; supported are {', '.join(known)}")
    config = SpeculativeConfig(
        method=_text(values, "method"),
        model=_text(values, "model"),
        num_speculative_tokens=_count(values, "num_speculative_tokens"),
        draft_tensor_parallel_size=_count(values, "draft_tensor_parallel_size"),
        num_speculative_tokens_per_batch_size=_ranges(values, BY_BATCH_SIZE),
    )
    if config.method not in (None, METHOD):
        raise BadInput(
            f"{FLAG}: method is {config.method!r}; only {METHOD!r} is supported, and is the default"
        )
    if config.draft_tensor_parallel_size not in (None, 1):
        raise BadInput(
            f"{FLAG}: draft_tensor_parallel_size is {config.draft_tensor_parallel_size}; only 1 is supported"
        )
    check_largest_k(config, f"{FLAG}: {BY_BATCH_SIZE}")
    return config


def check_largest_k(config: SpeculativeConfig, source: str) -> None:
    """Raises BadInput for ranges with a K above `num_speculative_tokens`. `source` names the ranges in the message."""
    most = config.num_speculative_tokens
    ks = list_range_ks(config.num_speculative_tokens_per_batch_size)
    if most is not None and (above := [str(k) for k in ks if k > most]):
        raise BadInput(
            f"{source} has K = {', '.join(above)}, more than num_speculative_tokens = {most}, which vLLM would use "
            f"instead: write {most}"
        )


def check_k_ranges(value: object, source: str) -> KRanges:
    """Checks K by the number of requests in the round: [first, last, K] each, both ends included, K = 0 for no drafts.

    The first range starts at 1, every other range right after the end of the range before it. Rounds of more requests
    than the last range names take its K. `source` names the value in messages. Raises BadInput.
    """
    example = "expected ranges [first, last, K] of requests in the round, for example [[1, 4, 7], [5, 8, 0]]"
    if not isinstance(value, list | tuple) or not value:
        raise BadInput(f"{source} is {reprlib.repr(value)}; {example}")
    ranges: list[tuple[int, int, int]] = []
    for one in value:
        if (
            not isinstance(one, list | tuple)
            or len(one) != 3
            or any(type(number) is not int for number in one)
        ):
            raise BadInput(f"{source} has {reprlib.repr(one)}; {example}")
        first, last, k = one
        if not (1 <= first <= last and k >= 0):
            raise BadInput(
                f"{source} has {[*one]}: first of at least 1, last of at least first, K of at least 0"
            )
        if not ranges and first > 1:
            raise BadInput(
                f"{source} starts at {first} requests in the round: the first range must start at 1"
            )
        start, end, before = ranges[-1] if ranges else (1, 0, 0)
        if first <= end:
            raise BadInput(
                f"{source} has {[*one]} after {[start, end, before]}: ranges must ascend without overlap"
            )
        if first > end + 1:
            raise BadInput(
                f"{source} has no K for {end + 1} to {first - 1} requests in the round. vLLM takes the K before: write "
                f"{[start, first - 1, before]}"
            )
        ranges.append((first, last, k))
    return tuple(ranges)


def list_range_ks(ranges: KRanges | None) -> list[int]:
    """Every K of `ranges`, ascending; none without ranges."""
    return sorted({k for *_, k in ranges or ()})


def choose_k(config: SpeculativeConfig, draft: Draft) -> int:
    """Returns the largest K: `num_speculative_tokens`, else the largest of the ranges, else the draft's default.

    Raises BadInput for more than a block holds.
    """
    most = config.num_speculative_tokens
    by_batch_size = list_range_ks(config.num_speculative_tokens_per_batch_size)
    for key, ks in (("num_speculative_tokens", [most or 0]), (BY_BATCH_SIZE, by_batch_size)):
        if above := [str(k) for k in ks if k > draft.max_k]:
            raise BadInput(
                f"{key} ({FLAG}) is {', '.join(above)}, but the draft's block_size is {draft.block}: "
                f"at most {draft.max_k} drafted tokens after the last token"
            )
    if most is None:
        return by_batch_size[-1] if by_batch_size else draft.default_k
    return most


def _ranges(values: dict[str, Any], key: str) -> KRanges | None:
    value = values.get(key)
    return None if value is None else check_k_ranges(value, f"{FLAG}: {key}")


def _text(values: dict[str, Any], key: str) -> str | None:
    value = values.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise BadInput(f"{FLAG}: {key} is {value!r}; expected a text")
    return value


def _count(values: dict[str, Any], key: str) -> int | None:
    value = values.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise BadInput(f"{FLAG}: {key} is {value!r}; expected a whole number of at least 1")
    return value
