"""What a report says of signatures that nobody verified."""

from dflash_aot.cache.signing.signatures import Signers


def describe_signers(signers: Signers | None) -> str:
    """In words."""
    if signers is None:
        return "no"
    who = ", ".join(key or "a key without a name" for key in signers.keys) or "nobody"
    if not signers.current:
        return f"not this manifest but another one, by {who}: it was built anew, or changed, since"
    return f"by {who}, says its file; verify --key tells whether that is so"
