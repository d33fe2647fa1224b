"""Where checkpoints are: a directory, a hub id in the local Hugging Face cache, or the pair that comes along."""

import os
import re
from pathlib import Path

from dflash_aot.cache.errors import BadCheckpoint

EMBEDDED = "embedded"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def locate_checkpoint(reference: str, role: str) -> Path:
    """The directory of `reference` for `role` ("target" or "draft"). Raises BadCheckpoint; downloads nothing."""
    if reference == EMBEDDED:
        return Path(__file__).parents[1] / "embedded" / role
    path = Path(os.path.expanduser(reference))
    try:
        if reference and path.is_dir():
            return path
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name no file can have
        raise BadCheckpoint(f"--{role} {reference[:80]!r}: {error}") from error
    if exists:
        raise BadCheckpoint(f"--{role} {reference} is a file: give the directory that holds config.json")
    if HUB_ID.fullmatch(reference) and not reference.startswith("."):
        return _locate_in_hub_cache(reference, role)
    raise BadCheckpoint(f"--{role} {reference}: no such directory")


def _locate_in_hub_cache(hub_id: str, role: str) -> Path:
    import huggingface_hub  # noqa: PLC0415  half a second that only hub ids pay

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, local_files_only=True))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise BadCheckpoint(
            f"--{role} {hub_id} is neither a directory nor in the local Hugging Face cache. "
            f"Download it first: hf download {hub_id}"
        ) from error
