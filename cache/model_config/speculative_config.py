"""vLLM's `speculative_config`: what people have at hand, with the meaning it has there."""

import json
from typing import Any

import msgspec

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Draft

FLAG = "--speculative_config"
METHOD = "dflash"
# vLLM takes these too. They would change what is computed, so they are not passed over.
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
    """The keys that are understood; None where the checkpoint decides."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    draft_tensor_parallel_size: int | None = None


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """A JSON object. Raises BadInput for what it cannot mean here."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{FLAG} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{FLAG} holds a {type(values).__name__}, not an object")
    known = SpeculativeConfig.__struct_fields__
    for key in values:
        if key in UNSUPPORTED_VLLM_KEYS:
            raise BadInput(f"{FLAG}: {key} is vLLM's, and not supported here: leave it out")
        if key not in known:
            raise BadInput(f"{FLAG}: unknown key {key!r}; known are {', '.join(known)}")
    config = SpeculativeConfig(
        method=_text(values, "method"),
        model=_text(values, "model"),
        num_speculative_tokens=_count(values, "num_speculative_tokens"),
        draft_tensor_parallel_size=_count(values, "draft_tensor_parallel_size"),
    )
    if config.method not in (None, METHOD):
        raise BadInput(
            f"{FLAG}: method is {config.method!r}; this runs {METHOD!r}, and detects it where it is left out"
        )
    if config.draft_tensor_parallel_size not in (None, 1):
        raise BadInput(f"{FLAG}: draft_tensor_parallel_size is {config.draft_tensor_parallel_size}; 1 is what there is")
    return config


def choose_k(config: SpeculativeConfig, draft: Draft) -> int:
    """K: as overridden, or as the draft's makers verify. Raises BadInput for more than its block holds."""
    wanted = config.num_speculative_tokens
    if wanted is not None and wanted > draft.block - 1:
        raise BadInput(
            f"{FLAG}: num_speculative_tokens is {wanted}, but the draft's block_size is {draft.block}: "
            f"the anchor and at most {draft.block - 1} drafted tokens"
        )
    return draft.default_k if wanted is None else wanted


def _text(values: dict[str, Any], key: str) -> str | None:
    value = values.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise BadInput(f"{FLAG}: {key} is {value!r}: a text is needed")
    return value


def _count(values: dict[str, Any], key: str) -> int | None:
    value = values.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise BadInput(f"{FLAG}: {key} is {value!r}: a whole number of at least 1 is needed")
    return value
