"""The manifest of a bundle (`manifest.json`): its contents, its encoding, and the commands that build it again."""

import functools
import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dflash_aot.cache.arrays import ArraySpec, arrays_by_name
from dflash_aot.cache.bundle.manifest_signature import check_signature
from dflash_aot.cache.bundle_spec import BundleSpec, Slice
from dflash_aot.cache.environment import Environment, EnvironmentDifference, describe_install
from dflash_aot.cache.errors import CorruptBundle, MissingBundle, NewerBundle
from dflash_aot.cache.files.atomic_files import read_plain
from dflash_aot.cache.files.locations import is_fetched
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.weight_recipe import WeightRecipe

SCHEMA = 21
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26  # a grid of a thousand executables takes a tenth of it
DIGEST_TAIL = b'"\n}\n'  # the file's end, after the digest
DIGEST = re.compile(rb'"digest": "[0-9a-f]{64}"(\s*}\s*)\Z')
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Version = Annotated[str, msgspec.Meta(pattern=r"\A[\w.+]{1,64}\Z")]
# Every JSON reader represents such a number exactly.
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class MemoryUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of one call in bytes per device, as the compiler reports it.

    Attributes:
        arguments: inputs.
        outputs: results and returned state.
        aliased: outputs that reuse the memory of donated inputs.
        temporaries: buffers during the call.
        code: the executable itself.
    """

    arguments: Size
    outputs: Size
    aliased: Size
    temporaries: Size
    code: Size


class InstructionEstimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of one instruction of the optimized program in one call.

    Attributes:
        instruction: its name.
        operation: its origin in the traced program, "" if the compiler added it.
        shape: of its result on one device.
        runs: how often it runs.
        seconds: of all its runs.
    """

    instruction: str
    operation: str
    shape: str
    runs: Size
    seconds: float


class UnestimatedWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Instructions of one kind for which the compiler estimates no cycles.

    Attributes:
        opcode: such as copy-start, an asynchronous copy.
        runs: how often such instructions run in one call.
        bytes: of their results in all runs, on one device.
    """

    opcode: str
    runs: Size
    bytes: Size


class ScheduleEstimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of one call on a TPU by the compiler's own estimate, see `compile.analysis.schedule`.

    Attributes:
        seconds: of the whole call.
        cycles: sum of the compiler's estimates, loops times their trip count.
        kernel_seconds: the part of `seconds` that follows from the bytes and flops of Pallas
            kernels, not from cycles.
        waiting_seconds: the part of `seconds` that is waited for main memory, beyond the
            compiler's cycles.
        largest: the instructions that take most, the longest first.
        left_out: instructions that `seconds` does not contain; of asynchronous copies, it
            contains the wait for their end.
        notes: what was assumed, such as a loop with an unknown trip count.
    """

    seconds: float
    cycles: Size
    kernel_seconds: float
    waiting_seconds: float
    largest: tuple[InstructionEstimate, ...]
    left_out: tuple[UnestimatedWork, ...]
    notes: tuple[str, ...]


class CallCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Work of one call.

    Attributes:
        flops: floating-point operations, as the compiler counts them; the body of a loop counts
            once.
        bytes_accessed: bytes read and written; the body of a loop counts once.
        schedule: the estimated time on a TPU; absent for other devices, and where the compiler
            estimates nothing.
        bound_seconds: the least time on a TPU, from the models' bytes and flops and the chip's
            peaks; absent for other devices.
        exchange_seconds: the part of `bound_seconds` in which devices sum arrays, which the
            schedule leaves out; absent for other devices.
    """

    flops: float
    bytes_accessed: float
    schedule: ScheduleEstimate | msgspec.UnsetType = msgspec.UNSET
    bound_seconds: float | msgspec.UnsetType = msgspec.UNSET
    exchange_seconds: float | msgspec.UnsetType = msgspec.UNSET

    @property
    def estimate_seconds(self) -> float | None:
        """The estimated time, with the least time of the sums; None if it is absent."""
        if self.schedule is msgspec.UNSET:
            return None
        return self.schedule.seconds + (self.exchange_seconds or 0.0)

    @property
    def ratio(self) -> float | None:
        """Estimated time over least time; None if either is absent."""
        if self.estimate_seconds is None or self.bound_seconds is msgspec.UNSET:
            return None
        return self.estimate_seconds / self.bound_seconds if self.bound_seconds else None


class SelfTestOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output of a self-test.

    Attributes:
        name: of the array.
        dtype: of the array.
        changed: how many of a state array's numbers the call changed; of a result, how many there
            are.
        values: some of these numbers, evenly spread.
        mean: of the absolute values of all.
    """

    name: str
    dtype: str
    changed: Size
    values: tuple[float, ...]
    mean: float


class SelfTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expected results of an executable's self-test, recorded after the build.

    Attributes:
        version: of the generated inputs (`cache.bundle.self_test.INPUTS_VERSION`).
        outputs: in the order of the signature.
    """

    version: int
    outputs: tuple[SelfTestOutput, ...]


class LargeCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instruction of the optimized program that copies a large argument.

    Attributes:
        buffer: name of the argument.
        instruction: name of the copying instruction.
        operation: its origin in the traced program, "" if the compiler added it.
        shape, bytes: of the copy on one device.
    """

    buffer: str
    instruction: str
    operation: str
    shape: str
    bytes: Size


class ExecutableAnalysis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an analysis of the optimized program found.

    Attributes:
        layouts: memory layout of each input and output by name, as XLA writes it,
            `{1,0:T(8,128)(2,1)}`: dimensions from minor to major, then tiles.
        copies: large copies of arguments.
        collectives: instructions between devices, counted by kind; the body of a loop counts
            once.
        donated: names of the inputs whose memory outputs reuse.
        largest: the instruction with the largest buffer of its own in main memory, "" if none has
            one.
    """

    layouts: dict[str, str]
    copies: tuple[LargeCopy, ...]
    collectives: dict[str, int]
    donated: tuple[str, ...]
    largest: str


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A compressed file that is named by its sha256.

    Attributes:
        sha256: of the file, in hex.
        bytes: size of the file.
        serialized_bytes: size of its decompressed content.
    """

    sha256: Sha256
    bytes: Size
    serialized_bytes: Size


class Entry(Blob, frozen=True, forbid_unknown_fields=True):
    """One executable of a bundle; the inherited fields describe its file.

    Attributes:
        signature: its program, bucket, inputs and outputs.
        key: its cache key.
        program: the file of its StableHLO, as `jax.export` writes it.
        seconds: compile time.
        memory: device memory of a call.
        cost: work of a call.
        compiler_options: what the compiler got in addition to the program.
        analysis: of the optimized program.
        self_test: its expected results, None if no device was there to run it on.
    """

    signature: Signature
    key: Sha256
    program: Blob
    seconds: float
    memory: MemoryUse
    cost: CallCost
    compiler_options: dict[str, str]
    analysis: ExecutableAnalysis
    self_test: SelfTest | None = None


class Manifest(BundleSpec, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of `manifest.json`: the bundle's spec, and what was built.

    Attributes:
        schema: version of this format.
        environment: what the executables were built for.
        state: the state arrays.
        weights: how each weight argument is made of checkpoint tensors.
        entries: the executables, in the order of the grid.
        digest: sha256 of the file with an empty digest, in hex.
    """

    schema: int
    environment: Environment
    state: tuple[ArraySpec, ...]
    weights: tuple[WeightRecipe, ...]
    entries: tuple[Entry, ...]
    digest: str = ""

    @classmethod
    def of(cls, spec: BundleSpec, **built: Any) -> "Manifest":
        """Returns the manifest of what was built of a spec; `built` are the fields that a spec has not."""
        return cls(**spec.fields(), schema=SCHEMA, **built)

    @property
    def slice(self) -> Slice:
        """The devices."""
        return Slice.of(self.environment)

    def arrays_by_name(self) -> dict[str, ArraySpec]:
        """Returns state and weight arrays by the names that signatures use."""
        return arrays_by_name(self.state, self.weights)


def rebuild_command(bundle: Path) -> str:
    """Returns the command that compiles corrupt or incompatible executables again, from the bundle's own programs.

    In another directory for a fetched bundle.
    """
    into = ["--bundle", "DIR"] if is_fetched(bundle) else []
    return shlex.join(["dflash-precompile", "--rebuild", str(bundle), *into])


def list_remedies(
    bundle: Path, built: Environment, found: Sequence[EnvironmentDifference], command: str
) -> list[str]:
    """Returns what makes a bundle and this machine fit, as lines of text.

    found: the differences, not empty. command: the one that built the bundle.
    """
    install = describe_install(built, found)
    lines = [install] if install else []
    if can_rebuild(built, found):
        again = "Or compile" if install else "Compile"
        return [
            *lines,
            f"{again} its programs again for this machine: {rebuild_command(bundle)}",
            f"or build it from its checkpoints: {command}",
        ]
    emulate = shlex.join(["dflash-bundle", "verify", str(bundle), "--execute", "--emulated", "DIR"])
    devices = f"{built.device_count} x {built.device_kind}"
    on = f"{built.topology} ({devices})" if built.topology else devices
    lines += [
        f"Serve it on {on}. A bundle for this machine needs another --platform, --topology or --tensor_parallel than "
        f"this command: {command}"
    ]
    return [*lines, f"To run it here, emulated: {emulate}"] if built.topology else lines


def can_rebuild(built: Environment, found: Sequence[EnvironmentDifference]) -> bool:
    """Whether compiling the bundle's programs again helps: not where the devices differ that they were made for."""
    devices = {"platform", "topology", "device_count"}
    return not {one.field for one in found} & (
        devices | {"device_kind"} if built.platform == "tpu" else devices
    )


def verify_and_rebuild_commands(bundle: Path) -> str:
    """Returns the commands for executables that are whole but misbehave.

    The first one quarantines them; otherwise the rebuild would use them again.
    """
    return f"{shlex.join(['dflash-bundle', 'verify', str(bundle), '--deep'])}; {rebuild_command(bundle)}"


def generic_build_command(bundle: Path) -> str:
    """Returns the build command for a bundle whose manifest cannot be read."""
    directory = "DIR" if is_fetched(bundle) else str(bundle)
    command = shlex.join(["dflash-precompile", "--bundle", directory])
    return f"{command} (with --target and --draft for a checkpoint pair of your own)"


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the manifest as indented JSON with its digest."""
    blank = msgspec.structs.replace(manifest, digest="")
    content = msgspec.json.format(msgspec.json.encode(blank), indent=1) + b"\n"
    before = content[: -len(DIGEST_TAIL)]
    after = content[-len(DIGEST_TAIL) :]
    return before + _digest(content).encode() + after


def read_manifest(bundle: Path, signed_by: Path | None = None) -> Manifest:
    """Returns the checked manifest of a bundle.

    signed_by: a public key; a manifest that its owner did not sign is not parsed.

    Raises MissingBundle or CorruptBundle, BadInput for an invalid key.
    """
    content = read_manifest_bytes(bundle)
    if signed_by is not None:
        check_signature(bundle, content, signed_by)
    return parse_manifest(bundle, content)


def read_manifest_bytes(bundle: Path) -> bytes:
    """Returns the bytes of a bundle's manifest, which signatures cover. Raises MissingBundle or CorruptBundle."""
    path = bundle / MANIFEST_FILE
    try:
        return read_plain(path, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingBundle(
            f"{path} does not exist: there is no bundle here. Build it: {generic_build_command(bundle)}"
        ) from error
    except OSError as error:
        raise CorruptBundle(
            f"{path}: {error.strerror}. Build it again: {generic_build_command(bundle)}"
        ) from error


def parse_manifest(bundle: Path, content: bytes) -> Manifest:
    """Returns the checked manifest of these bytes, read from `bundle`. Raises CorruptBundle."""
    return decode_manifest(
        content, str(bundle / MANIFEST_FILE), f"Build it again: {generic_build_command(bundle)}"
    )


# A command reads the manifest before it opens an engine, which reads it again.
@functools.lru_cache(maxsize=1)
def decode_manifest(content: bytes, path: str, remedy: str) -> Manifest:
    """Parses a manifest and checks its digest. `path` and `remedy` are for messages. Raises CorruptBundle."""
    try:
        schema = msgspec.json.decode(content, type=_Schema).schema
        if schema != SCHEMA:
            found = f"{path}: schema is {schema}, this version reads {SCHEMA}."
            if schema > SCHEMA:
                newer = "It was built by a newer dflash-aot: install that version."
                raise NewerBundle(f"{found} {newer} {remedy}")
            raise CorruptBundle(f"{found} {remedy}")
        manifest = msgspec.json.decode(content, type=Manifest)
        # Equal bytes prove that no name is there twice; encoding takes half the time of the check.
        if content != encode_manifest(manifest):
            _check_names(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise CorruptBundle(f"{path}: {error}. {remedy}") from error
    if manifest.digest != (found := _digest(_cut_digest(content))):
        raise CorruptBundle(
            f"{path}: digest is {manifest.digest or 'missing'}, its content has {found}. {remedy}"
        )
    return manifest


class _Schema(msgspec.Struct):
    schema: int


def _check_names(content: bytes) -> None:
    """Raises ValueError for a name that an object has twice: JSON allows that, but readers differ in the meaning."""

    def check(pairs: list[tuple[str, object]]) -> None:
        if len(dict(pairs)) < len(pairs):
            (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{name!r} is in an object twice")

    json.loads(content, object_pairs_hook=check)


def _cut_digest(content: bytes) -> bytes:
    """Returns the content with an empty digest."""
    return DIGEST.sub(rb'"digest": ""\1', content)


def _digest(content: bytes) -> str:
    """Returns the sha256 of a content with an empty digest, in hex."""
    return hashlib.sha256(content).hexdigest()
