"""`dflash-bundle gc`: removes what a bundle has no use for any more."""

import time
from contextlib import nullcontext
from pathlib import Path

import msgspec

from dflash_aot.bin.command_line import format_bytes
from dflash_aot.cache.bundle.garbage_collection import Garbage, find_garbage, remove
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.store import Store

HOUR = 3600.0


class Collection(msgspec.Struct, frozen=True):
    """The report; `bytes` are those of what was removed, or would be."""

    bundle: str
    dry_run: bool
    removed: tuple[Garbage, ...]
    kept: tuple[Garbage, ...]
    bytes: int


def report_garbage(bundle: Path, keep_hours: float, dry_run: bool, as_json: bool) -> int:
    """On standard output."""
    collection = collect_garbage(bundle, keep_hours, dry_run, time.time())
    print(
        msgspec.json.encode(collection, enc_hook=str).decode() if as_json else format_collection(collection, keep_hours)
    )
    return 0


def collect_garbage(bundle: Path, keep_hours: float, dry_run: bool, now: float) -> Collection:
    """Under the builders' lock, which nobody needs who only looks. With `keep_hours` 0 nothing is too young.

    Raises MissingBundle, CorruptBundle; BadInput where nothing can be written, BuildFailed where a builder is at work.
    """
    read_manifest(bundle)  # what is no bundle is not locked
    with nullcontext() if dry_run else Store(bundle).hold_lock():
        garbage = find_garbage(bundle, read_manifest(bundle), now)
        removed = [one for one in garbage if not keep_hours or one.age >= keep_hours * HOUR]
        if not dry_run:
            remove(removed)
    kept = [one for one in garbage if one not in removed]
    return Collection(str(bundle), dry_run, tuple(removed), tuple(kept), sum(one.bytes for one in removed))


def format_collection(one: Collection, keep_hours: float) -> str:
    """For people."""
    lines = [f"{garbage.path}: {garbage.why}, {format_bytes(garbage.bytes)}" for garbage in one.removed]
    if one.kept:
        young = f"changed less than {keep_hours:g} hours ago, or the manifest was"
        lines.append(f"{len(one.kept)} more stay: {young}. --keep_hours 0 removes them too")
    done = "would be removed" if one.dry_run else "removed"
    count = f"{len(one.removed)} file{'s' * (len(one.removed) != 1)}"
    return "\n".join([*lines, f"{count}, {format_bytes(one.bytes)} {done}"])
