"""Diagnostics: warnings about a checkpoint pair, a prompt, or drafts that are rarely accepted."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.quantization import plan_conversion, read_quantization
from dflash_aot.cache.model_config.speculators_draft import find_ambiguity
from dflash_aot.cache.model_config.tensor_names import list_unconverted
from dflash_aot.cache.weight_recipe import CheckpointRole, WeightFormat
from dflash_aot.runtime.text.chat_template import read_chat_template

ROUNDS_TO_DIAGNOSE = 200
# Acceptance of the first drafted token below which a draft is rarely worth its time.
LOW_ACCEPTANCE = 0.3
TEMPLATE_MARKS = ("<|", "[INST]")  # a prompt with such a mark was written for a chat template


def diagnose_pair(manifest: Manifest, end_tokens: frozenset[int]) -> Iterator[str]:
    """Yields warnings about the checkpoint pair, before the first request.

    end_tokens: the target's end-of-sequence tokens.
    """
    mask = manifest.draft.facts.mask_token
    if mask in end_tokens:
        yield (
            f"the draft's mask token {mask} is also one of the target's end tokens {sorted(end_tokens)}: answers end "
            "at this token; check the draft's mask_token_id"
        )


def diagnose_weights(
    manifest: Manifest, directories: Mapping[CheckpointRole, Path]
) -> Iterator[str]:
    """Yields warnings about a draft that other programs read otherwise, and about quantized numbers that are rounded.

    Raises BadCheckpoint.
    """
    if warning := find_ambiguity(read_config(directories["draft"])):
        yield warning
    formats: dict[CheckpointRole, WeightFormat] = {
        "target": manifest.formats.target,
        "draft": manifest.formats.draft,
    }
    for role, directory in directories.items():
        if quantization := read_quantization(read_config(directory)):
            weights = manifest.dtype if formats[role] == "plain" else formats[role]
            unconverted = list_unconverted(manifest.weights, role)
            conversion = plan_conversion(quantization, weights, manifest.dtype, unconverted)
            if not conversion.exact:
                yield f"{directory}: {conversion.summary}"


def diagnose_prompt(target: Path, prompt: str) -> str | None:
    """Returns a warning if the target has a chat template and the text of `prompt` does not follow any.

    A chat model and its draft were not trained on plain text. target: the checkpoint's directory.
    """
    try:
        template = read_chat_template(target)
    except BadCheckpoint:  # reported when a chat is rendered
        return None
    if template is None or any(mark in prompt for mark in TEMPLATE_MARKS):
        return None
    return (
        f"the target in {target} has a chat template and this prompt does not follow it: answers and acceptance "
        "suffer. Use --chat, or write the template's tokens into the prompt"
    )


def diagnose_acceptance(rounds: int, accepted: int) -> str | None:
    """Returns a warning if the first drafted token was rejected in most of at least ROUNDS_TO_DIAGNOSE rounds.

    rounds, accepted: of greedy requests only: how often a sampled token is the drafted one depends on the temperature
    and on the text more than on the draft.
    """
    if rounds < ROUNDS_TO_DIAGNOSE or accepted / rounds >= LOW_ACCEPTANCE:
        return None
    return (
        f"the first drafted token was accepted in only {accepted / rounds:.0%} of {rounds} greedy rounds. Possible "
        "causes: a draft for another target or fine-tune, a missing chat template, or thinking that the draft was not "
        "trained on. The output stays exact; k=0 may be faster"
    )
