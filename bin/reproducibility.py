"""dflash-precompile --check_reproducible: the same build once more, as somebody else would run it, compared."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.bundle.weight_recipe import CheckpointRole
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.locations import EMBEDDED, locate_checkpoint


class Comparison(msgspec.Struct, frozen=True):
    """How many executables of two builds have the same key, the same program, the same bytes."""

    executables: int
    same_keys: int
    same_programs: int
    same_bytes: int

    @property
    def words(self) -> str:
        counts = (("keys", self.same_keys), ("programs", self.same_programs), ("executables", self.same_bytes))
        return ", ".join(f"{same} of {self.executables} {what}" for what, same in counts) + " are the same"


def check_reproducible(bundle: Path, jobs: int) -> Comparison:
    """Builds what a bundle holds once more.

    In another directory, with another home, user (as the environment tells it) and hash seed, so many jobs, and nothing
    to find. The host has one name, so that is not tried. Executables
    for the CPU are compiled by several threads into one file, in the order in which they end: there only keys and
    programs must be the same. Raises BuildFailed where they are not, or for a TPU any byte is not.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-again-") as elsewhere:
        first, again = read_manifest(bundle), Path(elsewhere) / "bundle"
        _build_again([*first.build_flags(_locate), f"--bundle={again}", f"--jobs={jobs}"], elsewhere)
        second = read_manifest(again)
    found = _compare(first, second)
    must = [found.same_keys, found.same_programs]
    if first.environment.platform == "tpu":
        must.append(found.same_bytes)
    if any(same != found.executables for same in must):
        raise BuildFailed(
            f"{bundle} is not reproducible: {found.words}. dflash-bundle diff tells what differs between two bundles"
        )
    return found


def _locate(reference: str, role: CheckpointRole) -> str:
    """Where a checkpoint is, also for somebody with another home."""
    return reference if reference == EMBEDDED else str(locate_checkpoint(reference, role).absolute())


def _build_again(flags: Sequence[str], elsewhere: str) -> None:
    environment = {
        **os.environ,
        "HOME": elsewhere,
        "USER": "somebody-else",
        "LOGNAME": "somebody-else",
        "PYTHONHASHSEED": "31337",
    }
    command = [sys.executable, "-P", "-m", "dflash_aot.bin.precompile", *flags, "--nocanaries", "--json"]
    done = subprocess.run(command, cwd=elsewhere, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise BuildFailed(f"built a second time, to compare, it ends with {done.returncode}: {''.join(last)}")


def _compare(first: Manifest, second: Manifest) -> Comparison:
    entries = {entry.signature.label: entry for entry in second.entries}
    pairs = [(entry, entries[entry.signature.label]) for entry in first.entries]
    return Comparison(
        executables=len(pairs),
        same_keys=sum(one.key == other.key for one, other in pairs),
        same_programs=sum(one.program == other.program for one, other in pairs),
        same_bytes=sum(one.sha256 == other.sha256 for one, other in pairs),
    )
