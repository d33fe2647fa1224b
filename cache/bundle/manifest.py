"""`manifest.json`: everything that is known about a bundle without loading an executable."""

import functools
import hashlib
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from dflash_aot.cache.bundle.atomic_files import read_plain
from dflash_aot.cache.bundle.weight_recipe import CheckpointRole, FloatDtype, WeightRecipe
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import CorruptBundle, MissingBundle
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.locations import EMBEDDED
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.cache.signature import ArraySpec, Signature, arrays_by_name
from dflash_aot.cache.signing.signatures import check_signature
from dflash_aot.cache.topology import TOPOLOGIES

SCHEMA = 6
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26  # bytes; a grid of a thousand executables takes a tenth
DIGEST_TAIL = b'"\n}\n'  # behind the digest
DIGEST = re.compile(rb'"digest": "[0-9a-f]{64}"(\s*}\s*)\Z')
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # which every reader of JSON holds exactly


class MemoryUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes on the device, as the compiler counts them."""

    arguments: Size
    outputs: Size
    aliased: Size
    temporaries: Size
    code: Size


class CallCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The compiler's own count of a call; it counts the body of a loop once."""

    flops: float
    bytes_accessed: float


class SelfTestOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An output of a canary. Of state, what the call `changed`; of a result, all.

    changed: how many numbers. values: some of them, evenly spread. mean: of all, without their signs.
    """

    name: str
    dtype: str
    changed: Size
    values: tuple[float, ...]
    mean: float


class SelfTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an executable computed from the inputs of `runtime.self_test.inputs` in this `version`."""

    version: int
    outputs: tuple[SelfTestOutput, ...]


class LargeCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instruction of the optimized program that lays down once more what an argument, `buffer`, holds.

    `operation` is where it comes from in the traced program, "" where the compiler made it. Shape and bytes are those
    of one device.
    """

    buffer: str
    instruction: str
    operation: str
    shape: str
    bytes: Size


class ExecutableAnalysis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the optimized program is like: how inputs and outputs lie in memory, what it copies, what devices exchange.

    `layouts` by name, as XLA writes them, `{1,0:T(8,128)(2,1)}`: dimensions minor to major, then tiles. `collectives`
    counts instructions by kind; one in the body of a loop counts once. `donated` names the inputs over which outputs
    are written, `largest` the instruction with the largest buffer of its own in main memory, "" for none.
    """

    layouts: dict[str, str]
    copies: tuple[LargeCopy, ...]
    collectives: dict[str, int]
    donated: tuple[str, ...]
    largest: str


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file named after its sha256. It is compressed: `serialized_bytes` is the size of what it holds."""

    sha256: Sha256
    bytes: Size
    serialized_bytes: Size


class Entry(Blob, frozen=True, forbid_unknown_fields=True):
    """One executable: the file that holds it, what it is and was compiled from, what it cost, what it computes.

    `program` is its StableHLO, as `jax.export` writes it. `canary` is None where there was no device to run it on.
    """

    signature: Signature
    key: Sha256
    program: Blob
    seconds: float
    memory: MemoryUse
    cost: CallCost
    analysis: ExecutableAnalysis = msgspec.field(name="inspection")
    self_test: SelfTest | None = msgspec.field(default=None, name="canary")


class TargetModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target as the user named it, and what its executables compute."""

    reference: str
    facts: Target


class DraftModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The draft as the user named it, and what its executables compute."""

    reference: str
    facts: Draft


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole bundle. `entries` are in the order of the grid; every weight and state array is named once."""

    schema: int
    environment: Environment
    target: TargetModel
    draft: DraftModel
    dtype: FloatDtype
    sampling: tuple[SamplingMode, ...]
    grid: Grid
    state: tuple[ArraySpec, ...]
    weights: tuple[WeightRecipe, ...]
    entries: tuple[Entry, ...]
    digest: str = ""

    def arrays_by_name(self) -> dict[str, ArraySpec]:
        """State and weights by name, as signatures refer to them."""
        return arrays_by_name(self.state, self.weights)

    def build_command(self, bundle: Path) -> str:
        """The command that makes this bundle here, from its checkpoints."""
        return shlex.join(["dflash-precompile", "--bundle", str(bundle), *self.build_flags()])

    def build_flags(self, locate: Callable[[str, CheckpointRole], str] = lambda reference, _: reference) -> list[str]:
        """What `dflash-precompile` is told, but for the place; checkpoints as `locate` gives them."""
        pair = [] if self.target.reference == EMBEDDED else [
            "--target", locate(self.target.reference, "target"), "--draft", locate(self.draft.reference, "draft")
        ]  # fmt: skip
        facts = ["--buckets", str(self.grid), "--dtype", self.dtype, "--sampling", ",".join(self.sampling)]
        return [*pair, *facts, *_name_devices(self.environment)]


def _name_devices(environment: Environment) -> list[str]:
    """The flags that ask for these devices; a slice by its name where all of it is used."""
    platform = ["--platform", "cuda" if environment.platform == "gpu" else environment.platform]
    topology = TOPOLOGIES.get(environment.topology)
    if topology and topology.devices == environment.device_count:
        return [*platform, "--topology", topology.name]
    return [*platform, *(["--tensor_parallel", str(environment.device_count)] if environment.device_count > 1 else [])]


def rebuild_command(bundle: Path) -> str:
    """The command that compiles anew what of a bundle is broken or does not fit, from the programs that it holds."""
    return shlex.join(["dflash-precompile", "--rebuild", str(bundle)])


def verify_and_rebuild_commands(bundle: Path) -> str:
    """The same for what is whole and does not do what it should: a builder takes it, unless it was set aside."""
    return f"{shlex.join(['dflash-bundle', 'verify', str(bundle), '--deep'])}; {rebuild_command(bundle)}"


def generic_build_command(bundle: Path) -> str:
    """The command that builds a bundle of which nothing can be read."""
    command = shlex.join(["dflash-precompile", "--bundle", str(bundle)])
    return f"{command} (and --target, --draft for a pair of your own)"


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON that a person can read, with its own digest."""
    blank = msgspec.structs.replace(manifest, digest="")
    content = msgspec.json.format(msgspec.json.encode(blank), indent=1) + b"\n"
    before, after = content[: -len(DIGEST_TAIL)], content[-len(DIGEST_TAIL) :]
    return before + _digest(content).encode() + after


def read_manifest(bundle: Path, signed_by: Path | None = None) -> Manifest:
    """The checked manifest of a bundle. What the owner of a public key, `signed_by`, did not sign is not even parsed.

    Raises MissingBundle or CorruptBundle; BadInput for a key that is none.
    """
    content = read_manifest_bytes(bundle)
    if signed_by is not None:
        check_signature(bundle, content, signed_by)
    return parse_manifest(bundle, content)


def read_manifest_bytes(bundle: Path) -> bytes:
    """The manifest as it lies there, which is what is signed. Raises MissingBundle or CorruptBundle."""
    path = bundle / MANIFEST_FILE
    try:
        return read_plain(path, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingBundle(
            f"{path} does not exist: there is no bundle here. Build it: {generic_build_command(bundle)}"
        ) from error
    except OSError as error:
        raise CorruptBundle(f"{path}: {error.strerror}. Build it again: {generic_build_command(bundle)}") from error


def parse_manifest(bundle: Path, content: bytes) -> Manifest:
    """Raises CorruptBundle."""
    return decode_manifest(content, str(bundle / MANIFEST_FILE), f"Build it again: {generic_build_command(bundle)}")


@functools.lru_cache(maxsize=1)  # a command reads it before it opens an engine, which reads it again
def decode_manifest(content: bytes, path: str, remedy: str) -> Manifest:
    """The checked manifest that lay at `path`. Raises CorruptBundle."""
    try:
        schema = msgspec.json.decode(content, type=_Schema).schema
        if schema != SCHEMA:
            newer = "It was built by a newer dflash-aot: install that. " if schema > SCHEMA else ""
            raise CorruptBundle(f"{path}: schema is {schema}, this version reads {SCHEMA}. {newer}{remedy}")
        manifest = msgspec.json.decode(content, type=Manifest)
        if content != encode_manifest(manifest):  # which names nothing twice, and is made in half of the time
            _check_names(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise CorruptBundle(f"{path}: {error}. {remedy}") from error
    if manifest.digest != (found := _digest(_cut_digest(content))):
        raise CorruptBundle(f"{path}: digest is {manifest.digest or 'missing'}, its content has {found}. {remedy}")
    return manifest


class _Schema(msgspec.Struct):
    schema: int


def _check_names(content: bytes) -> None:
    """JSON allows a name twice in an object, and no two readers agree on what that means. Raises ValueError."""

    def check(pairs: list[tuple[str, object]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in an object")

    json.loads(content, object_pairs_hook=check)


def _cut_digest(content: bytes) -> bytes:
    """The file as it was before the digest was written into its end."""
    return DIGEST.sub(rb'"digest": ""\1', content)


def _digest(content: bytes) -> str:
    """sha256 of the file with an empty digest."""
    return hashlib.sha256(content).hexdigest()
