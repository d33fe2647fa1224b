"""Where users go wrong without an error: things worth a warning, in the log of `dflash_aot.runtime`."""

import json
from collections.abc import Iterator
from pathlib import Path

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.runtime.metrics.counters import Counters

ROUNDS_TO_DIAGNOSE, LOW_ACCEPTANCE = 200, 0.3


def diagnose_pair(manifest: Manifest, ends: frozenset[int]) -> Iterator[str]:
    """What can be seen before the first request."""
    mask = manifest.draft.facts.mask_token
    if mask in ends:
        yield (
            f"the draft's mask token {mask} is also one of the target's end tokens {sorted(ends)}: "
            "an answer ends where it stands; check the draft's mask_token_id"
        )


def diagnose_prompt(target: Path, prompt: str) -> str | None:
    """A chat model was asked in plain text: it was not trained on that, and neither was its draft."""
    template = read_chat_template(target)
    if template is None or any(mark in prompt for mark in ("<|", "[INST]")):
        return None
    return (
        f"the target in {target} has a chat template and this prompt does not follow it: answers and acceptance "
        "suffer. Use --chat, or write the template's tokens into the prompt"
    )


def diagnose_acceptance(counters: Counters) -> str | None:
    """After enough rounds, the first drafted token stands in too few of them."""
    if not counters.verified_at or counters.verified_at[0] < ROUNDS_TO_DIAGNOSE:
        return None
    share = counters.accepted_at[0] / counters.verified_at[0]
    if share >= LOW_ACCEPTANCE:
        return None
    return (
        f"the first drafted token stood in only {share:.0%} of {counters.verified_at[0]} rounds. A draft for another "
        "target or fine-tune, a missing chat template, or thinking that the draft was not trained on does that; "
        "output stays exact, and k=0 may be faster"
    )


def read_chat_template(target: Path) -> str | None:
    """As far as a look at the files tells; a template that cannot be read is `--chat`'s to refuse."""
    try:
        if (target / "chat_template.jinja").is_file():
            return (target / "chat_template.jinja").read_text(encoding="utf-8")
        template = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return template if isinstance(template, str) else None
