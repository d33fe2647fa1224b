"""`dflash-bundle push` and `fetch`: bundles to where others find them, and from there."""

import json
from pathlib import Path

import msgspec

from dflash_aot.bin.bundle_fetch import fetch_with_progress
from dflash_aot.bin.command_line import format_bytes
from dflash_aot.cache.remote.push import push_bundle


def report_push(bundle: Path, url: str, as_json: bool) -> int:
    """On standard output."""
    pushed = push_bundle(bundle, url)
    if as_json:
        print(json.dumps({"bundle": str(bundle), **msgspec.to_builtins(pushed)}))
    else:
        print(f"{pushed.sent} files sent, {format_bytes(pushed.bytes)}; {pushed.kept} were there: {pushed.url}")
    return 0


def report_fetch(url: str, key: Path | None, as_json: bool) -> int:
    """The directory of the copy, on standard output."""
    bundle = fetch_with_progress(url, key)
    print(json.dumps({"bundle": str(bundle)}) if as_json else bundle)
    return 0
