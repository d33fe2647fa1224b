"""Whether a manifest has the executables that its grid promises."""

from pathlib import Path

from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.manifest import Manifest
from dflash_aot.cache.signature import Signature

Name = tuple[str, tuple[int, ...]]
VERIFIES = {"greedy": "verify", "sample": "sampled_verify"}


def check_complete(path: Path, manifest: Manifest) -> None:
    """Every bucket of the grid has its executables. Raises CorruptBundle."""
    grid = manifest.grid
    needed: set[Name] = {("prefill", (chunk.prefill, chunk.length)) for chunk in grid.chunks()}
    needed |= {("kv_write", (1, chunk.prefill)) for chunk in grid.chunks()}
    needed |= {("move", ())} if grid.slots > 1 else set()
    needed |= {("admit", ())} if "sample" in manifest.sampling else set()
    verifies = {VERIFIES[kind] for kind in manifest.sampling}
    for bucket in grid.buckets():
        shape = (bucket.batch, bucket.length, bucket.k)
        needed |= {("kv_write", (bucket.batch, bucket.k + 1)), *((name, shape) for name in verifies)}
        needed |= {("draft", shape)} if bucket.k else set()
    if missing := needed - {name_executable(entry.signature) for entry in manifest.entries}:
        raise CorruptBundle(
            f"{path}/manifest.json promises the grid {grid} but has no entry for {sorted(missing)}. "
            f"Build it again: {manifest.rebuild_command(path)}"
        )


def name_executable(signature: Signature) -> Name:
    """What an executable is looked up by."""
    return signature.program, tuple(signature.bucket.values())
