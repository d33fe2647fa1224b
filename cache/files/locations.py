"""Locations that a user names: checkpoint directories and hub ids, URLs, the user's cache directory."""

import os
import re
from pathlib import Path

from dflash_aot.cache.errors import BadCheckpoint, BadInput

FETCHED_DIRECTORY = "fetched"  # below the user's cache directory
EMBEDDED = "embedded"  # the reference of the checkpoint pair that is shipped in the package
# With a revision: a commit, branch or tag.
HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
URL = re.compile(r"[a-z][a-z0-9+.-]*(://|::)", re.ASCII | re.IGNORECASE)
# Both meet error texts of stores, and take linear time on any text: a scheme is tried at its first letter only, and
# an address without a query is consumed too.
URL_USER = re.compile(r"(?<![a-z0-9+.-])([a-z0-9+.-]+)://([^/\s]*)@", re.ASCII | re.IGNORECASE)
URL_QUERY = re.compile(r"(://[^\s?]*)(?:\?[^\s'\")]*)?")
# abfs://container@account/path: the part before the @ is a container here, not a secret.
AZURE_SCHEMES = ("abfs", "abfss", "az")


def locate_checkpoint(reference: str, role: str) -> Path:
    """Returns the directory of a checkpoint; downloads nothing.

    `reference` is a directory, a hub id in the local Hugging Face cache, maybe with @REVISION, or EMBEDDED; `role` is
    "target" or "draft". Raises BadCheckpoint.
    """
    if reference == EMBEDDED:
        return Path(__file__).parents[1] / "embedded" / role
    path = Path(os.path.expanduser(reference))
    try:
        if reference and path.is_dir():
            return path
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise BadCheckpoint(f"--{role} {reference[:80]!r}: {error}") from error
    if exists:
        raise BadCheckpoint(
            f"--{role} {reference} is a file: give the directory that holds config.json"
        )
    if (found := HUB_ID.fullmatch(reference)) and not reference.startswith("."):
        return _locate_in_hub_cache(found[1], found[2], role)
    raise BadCheckpoint(f"--{role} {reference}: no such directory")


def _locate_in_hub_cache(hub_id: str, revision: str | None, role: str) -> Path:
    import huggingface_hub  # noqa: PLC0415  takes half a second: imported for hub ids only

    try:
        return Path(
            huggingface_hub.snapshot_download(hub_id, revision=revision, local_files_only=True)
        )
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise BadCheckpoint(
            f"--{role} {hub_id}{f'@{revision}' * bool(revision)} is neither a directory nor in the local Hugging Face "
            f"cache. Download it first: hf download {hub_id}{f' --revision {revision}' * bool(revision)}"
        ) from error


def user_cache_directory() -> Path:
    """Returns the directory for this project's caches, below XDG_CACHE_HOME or ~/.cache. Raises BadInput."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(given or Path.home() / ".cache") / "dflash-aot"
    except RuntimeError as error:  # a user without an entry in the system's list, as in containers
        raise BadInput(f"{error}: set HOME or XDG_CACHE_HOME, or name directories") from error


def is_fetched(bundle: Path) -> bool:
    """Whether a directory is in the cache of fetched bundles, where the next fetch undoes what was built."""
    try:
        copies = user_cache_directory() / FETCHED_DIRECTORY
    except BadInput:
        return False
    return copies.absolute() in bundle.absolute().parents


def is_url(location: str) -> bool:
    """Whether a location is a URL for fsspec rather than a path."""
    return URL.match(location) is not None


def choose_directory(location: str, remedy: str) -> Path:
    """The path of a directory. Raises BadInput for a URL, with the remedy, and for a link that leads nowhere."""
    if is_url(location):
        raise BadInput(
            f"{hide_secrets(location)} is a URL, and a directory is needed here. {remedy}"
        )
    path = Path(location)
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise BadInput(
                f"{place} is a link to {os.readlink(place)}, which does not exist: remove the link, or make what it "
                "leads to"
            )
    return path


def hide_secrets(text: str) -> str:
    """Returns a text with its URLs stripped of users, passwords and queries (a query may hold a signature)."""
    return URL_QUERY.sub(r"\1", URL_USER.sub(_drop_user, text))


def _drop_user(found: re.Match[str]) -> str:
    scheme, user = found.groups()
    kept = f"{user}@" if scheme.lower() in AZURE_SCHEMES and ":" not in user else ""
    return f"{scheme}://{kept}"
