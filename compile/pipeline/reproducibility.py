"""Reproducibility check: builds a bundle a second time, as another user would, and compares the two."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.bundle.weight_recipe import CheckpointRole
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.locations import EMBEDDED, locate_checkpoint
from dflash_aot.compile.pipeline.build_target import BuildTarget, TargetDevices, name_target

SECOND_BUILD = "import json, sys; from dflash_aot.compile import precompile; precompile(**json.load(sys.stdin))"


class Comparison(msgspec.Struct, frozen=True):
    """How far two builds agree.

    Attributes:
        executables: how many there are.
        same_keys: executables with the same key.
        same_programs: executables with the same program.
        same_bytes: executables with the same bytes.
    """

    executables: int
    same_keys: int
    same_programs: int
    same_bytes: int

    @property
    def summary(self) -> str:
        counts = (("keys", self.same_keys), ("programs", self.same_programs), ("executables", self.same_bytes))
        return ", ".join(f"{same} of {self.executables} {what}" for what, same in counts) + " are the same"


def check_second_devices(target: BuildTarget) -> None:
    """Raises BadInput for an attached TPU: this process holds it, and the second build is another process."""
    if isinstance(target, TargetDevices) and target.environment.platform == "tpu":
        raise BadInput(
            "--check_reproducible: only one process can use a TPU, and the second build is another one. Build with "
            "--topology on a machine without a TPU: that gives the same executables"
        )


def check_reproducible(bundle: Path, jobs: int) -> Comparison:
    """Builds the bundle again, with another home, user, hash seed and directory, and without a shared store.

    The second build compiles `jobs` executables at a time. It keeps the host's name. Executables for a CPU are compiled
    by several threads into one file, in the order in which the threads finish: there only keys and programs must be the
    same. Raises BuildFailed where keys or programs differ, or for a TPU any byte does.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-again-") as elsewhere:
        first, again = read_manifest(bundle), Path(elsewhere) / "bundle"
        _build_again({**_list_arguments(first), "bundle": str(again), "jobs": jobs}, elsewhere)
        second = read_manifest(again)
    found = _compare(first, second)
    required = [found.same_keys, found.same_programs]
    if first.environment.platform == "tpu":
        required.append(found.same_bytes)
    if any(same != found.executables for same in required):
        raise BuildFailed(
            f"{bundle} is not reproducible: {found.summary}. dflash-bundle diff shows the differences of two bundles"
        )
    return found


def _list_arguments(manifest: Manifest) -> dict[str, Any]:
    """The arguments of `precompile` that a bundle was built with, but for its directory."""
    platform, topology, tensor_parallel = name_target(manifest.environment)
    return {
        "target": _locate(manifest.target.reference, "target"),
        "draft": _locate(manifest.draft.reference, "draft"),
        "grid": str(manifest.grid),
        "platform": platform,
        "topology": topology,
        "tensor_parallel": tensor_parallel,
        "dtype": manifest.dtype,
        "sampling": manifest.sampling,
        **manifest.weight_flags(),
        "self_test": False,
    }


def _locate(reference: str, role: CheckpointRole) -> str:
    """The checkpoint's directory, which a user with another home finds too."""
    return reference if reference == EMBEDDED else str(locate_checkpoint(reference, role).absolute())


def _build_again(arguments: dict[str, Any], elsewhere: str) -> None:
    environment = {
        **os.environ,
        "HOME": elsewhere,
        "USER": "somebody-else",
        "LOGNAME": "somebody-else",
        "PYTHONHASHSEED": "31337",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", SECOND_BUILD],
        input=json.dumps(arguments).encode(),
        cwd=elsewhere,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise BuildFailed(f"the second build, for comparison, ended with {done.returncode}: {''.join(last)}")


def _compare(first: Manifest, second: Manifest) -> Comparison:
    entries = {entry.signature.label: entry for entry in second.entries}
    pairs = [(entry, entries[entry.signature.label]) for entry in first.entries]
    return Comparison(
        executables=len(pairs),
        same_keys=sum(one.key == other.key for one, other in pairs),
        same_programs=sum(one.program == other.program for one, other in pairs),
        same_bytes=sum(one.sha256 == other.sha256 for one, other in pairs),
    )
