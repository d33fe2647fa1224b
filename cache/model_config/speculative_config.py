"""vLLM's `speculative_config`, with the meaning it has in vLLM."""

import json
from typing import Any

import msgspec

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Draft

FLAG = "--speculative_config"
METHOD = "dflash"
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

    method: "dflash".
    model: the draft checkpoint.
    num_speculative_tokens: K.
    draft_tensor_parallel_size: 1.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    draft_tensor_parallel_size: int | None = None


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
    )
    if config.method not in (None, METHOD):
        raise BadInput(f"{FLAG}: method is {config.method!r}; only {METHOD!r} is supported, and is the default")
    if config.draft_tensor_parallel_size not in (None, 1):
        raise BadInput(
            f"{FLAG}: draft_tensor_parallel_size is {config.draft_tensor_parallel_size}; only 1 is supported"
        )
    return config


def choose_k(config: SpeculativeConfig, draft: Draft) -> int:
    """Returns K: `num_speculative_tokens`, or the draft's default. Raises BadInput for more than a block holds."""
    wanted = config.num_speculative_tokens
    if wanted is not None and wanted > draft.block - 1:
        raise BadInput(
            f"{FLAG}: num_speculative_tokens is {wanted}, but the draft's block_size is {draft.block}: "
            f"the last token and at most {draft.block - 1} drafted tokens"
        )
    return draft.default_k if wanted is None else wanted


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
