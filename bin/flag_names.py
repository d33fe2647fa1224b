"""Flag names of the commands that import JAX, to refuse a misspelt one before that import, which takes seconds.

The commands' modules define the flags; a test compares these names with them.
"""

import difflib
import re
from collections.abc import Collection, Sequence

PAIR = "bundle target draft require_signature"
FLAG_NAMES = {
    command: frozenset(f"{PAIR} {names}".split())
    for command, names in {
        "dflash-precompile": """
            buckets draft_weights dtype exact executor jobs json plan platform ray_address
            rebuild sampling self_test speculative_config store tau tensor_parallel topology weights
        """,
        "dflash-run": """
            cache_salt chat frequency_penalty ignore_eos input json k logprobs max_tokens min_p min_tokens output
            prefix_caching presence_penalty prompt prompt_logprobs repetition_penalty seed speculative_config stats stop
            temperature thinking top_k top_p trace
        """,
        "dflash-serve": """
            access_log api_keys drain_seconds host k max_body_bytes max_per_key max_prompt_tokens max_waiting port
            prefix_caching preload request_seconds served_model_name speculative_config temperature
            tls_certificate tls_key
        """,
    }.items()
}
HELP = frozenset({"help", "helpfull", "helpshort", "helpxml", "version", "flagfile", "undefok"})


def find_unknown_flag(arguments: Sequence[str], names: Collection[str]) -> str | None:
    """The message for the first argument that cannot be a flag of the command; None if there is none.

    An argument behind a flag without `=` may be that flag's value, and is left to the command.
    """
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if argument == "--":
            return None
        name = re.match(r"--([^=]+)", argument)
        if not name or (before.startswith("-") and "=" not in before):
            continue
        if name[1] not in {*names, *HELP} and name[1].removeprefix("no") not in names:
            near = difflib.get_close_matches(name[1], names, cutoff=0.8)
            hint = f". Did you mean: {', '.join(near)} ?" if near else ""
            return f"Unknown command line flag '{name[1]}'{hint}"
    return None
