"""`dflash-bundle inspect`: what a bundle holds, and whether this machine can serve it, before JAX starts."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from dflash_aot.bin.bundle_signature import describe_signers
from dflash_aot.bin.command_line import format_bytes, format_table
from dflash_aot.cache.bundle.manifest import (
    Blob,
    DraftModel,
    Manifest,
    TargetModel,
    mend_command,
    parse_manifest,
    read_content,
)
from dflash_aot.cache.bundle.manifest_checks import check_consistent
from dflash_aot.cache.environment import Difference, Environment, compare_host
from dflash_aot.cache.errors import IncompatibleBundle
from dflash_aot.cache.model_config.architecture import Decoder
from dflash_aot.cache.signing.signatures import Signers, list_signers

HEADER = ("program", "executables", "size", "largest", "temporaries")


class ProgramSummary(msgspec.Struct, frozen=True):
    """All executables of a program: bytes of their files, and of the one that takes most temporaries on a device."""

    program: str
    executables: int
    bytes: int
    largest: int
    temporaries: int


class DeviceMemory(msgspec.Struct, frozen=True):
    """Bytes on each device: weights, state of all slots, the most that one executable needs besides."""

    weights: int
    state: int
    temporaries: int


class Verdict(msgspec.Struct, frozen=True):
    """Whether it may serve here, as far as that is known; the other fields only a started JAX can tell."""

    fits: bool
    differences: tuple[Difference, ...]
    known_only_when_jax_starts: tuple[str, ...]
    mend: str
    rebuild: str


class Inspection(msgspec.Struct, frozen=True):
    """The report; `bytes` are those of the executables' files, `program_bytes` of what they were compiled from."""

    bundle: str
    schema: int
    target: TargetModel
    draft: DraftModel
    grid: str
    dtype: str
    sampling: tuple[str, ...]
    programs: tuple[ProgramSummary, ...]
    executables: int
    bytes: int
    program_bytes: int
    memory_per_device: DeviceMemory
    environment: Environment
    signers: Signers | None
    verdict: Verdict


def report_inspection(bundle: Path, as_json: bool) -> int:
    """On standard output; 0 if it may serve here, else the code of an incompatible bundle."""
    content = read_content(bundle)
    manifest = parse_manifest(bundle, content)
    check_consistent(bundle, manifest)
    inspection = inspect_bundle(bundle, manifest, list_signers(bundle, content))
    print(msgspec.json.encode(inspection).decode() if as_json else format_inspection(inspection))
    return 0 if inspection.verdict.fits else IncompatibleBundle.exit_code


def inspect_bundle(bundle: Path, manifest: Manifest, signers: Signers | None) -> Inspection:
    """From the manifest alone."""
    programs = summarize_programs(manifest)
    found, unknown = compare_host(manifest.environment)
    return Inspection(
        bundle=str(bundle),
        schema=manifest.schema,
        target=manifest.target,
        draft=manifest.draft,
        grid=str(manifest.grid),
        dtype=manifest.dtype,
        sampling=manifest.sampling,
        programs=programs,
        executables=sum(one.executables for one in programs),
        bytes=_count_bytes(manifest.entries),
        program_bytes=_count_bytes(entry.program for entry in manifest.entries),
        memory_per_device=measure_memory(manifest),
        environment=manifest.environment,
        signers=signers,
        verdict=Verdict(
            fits=not found,
            differences=tuple(found),
            known_only_when_jax_starts=tuple(unknown),
            mend=mend_command(bundle),
            rebuild=manifest.rebuild_command(bundle),
        ),
    )


def summarize_programs(manifest: Manifest) -> tuple[ProgramSummary, ...]:
    """In the order in which they first appear."""
    summaries = []
    for program in dict.fromkeys(entry.signature.program for entry in manifest.entries):
        entries = [entry for entry in manifest.entries if entry.signature.program == program]
        sizes, temporaries = [one.bytes for one in entries], max(one.memory.temporaries for one in entries)
        summaries.append(ProgramSummary(program, len(entries), sum(sizes), max(sizes), temporaries))
    return tuple(summaries)


def measure_memory(manifest: Manifest) -> DeviceMemory:
    """As the manifest has it."""
    devices, state = manifest.environment.device_count, {array.name for array in manifest.state}
    arrays = manifest.known_arrays().values()
    return DeviceMemory(
        weights=sum(array.shard_bytes(devices) for array in arrays if array.name not in state),
        state=sum(array.shard_bytes(devices) for array in manifest.state),
        temporaries=max((entry.memory.temporaries for entry in manifest.entries), default=0),
    )


def format_inspection(one: Inspection) -> str:
    """For people."""
    memory, devices = one.memory_per_device, one.environment.device_count
    facts = {
        "target": f"{one.target.reference} ({_describe(one.target.facts.decoder)})",
        "draft": f"{one.draft.reference} ({one.draft.facts.dialect}'s format, {_describe(one.draft.facts.decoder)})",
        "grid": one.grid,
        "dtype": one.dtype,
        "sampling": ", ".join(one.sampling),
        "memory": f"of {devices} device{'s' * (devices > 1)} each: {format_bytes(memory.weights)} of weights, "
        f"{format_bytes(memory.state)} of state, up to {format_bytes(memory.temporaries)} of temporaries",
        "signed": describe_signers(one.signers),
    }
    cells = [
        (row.program, str(row.executables), *map(format_bytes, (row.bytes, row.largest, row.temporaries)))
        for row in one.programs
    ]
    total = (
        f"{one.executables} executables, {format_bytes(one.bytes)}; their programs, {format_bytes(one.program_bytes)}"
    )
    environment = {f"  {name}": _spell(value) for name, value in msgspec.structs.asdict(one.environment).items()}
    sections = (
        [f"{one.bundle}: schema {one.schema}, {total}"],
        _align(facts),
        [format_table(HEADER, cells)],
        ["built for", *_align({name: value for name, value in environment.items() if value})],
        format_verdict(one.verdict),
    )
    return "\n".join(line for lines in sections for line in lines)


def format_verdict(verdict: Verdict) -> list[str]:
    """Field by field, with the command that mends it."""
    unknown = verdict.known_only_when_jax_starts
    later = [f"known only when JAX starts: {', '.join(unknown)}"] if unknown else []
    if verdict.fits:
        return ["here: nothing known speaks against serving it", *later]
    lines = [f"  {one.field}: built for {one.built!r}, here {one.here!r}" for one in verdict.differences]
    remedy = [f"Build it for this machine: {verdict.mend}", f"or, from its checkpoints: {verdict.rebuild}"]
    return ["here: it cannot be served", *lines, *later, *remedy]


def _count_bytes(blobs: Iterable[Blob]) -> int:
    """Of files, which entries may share."""
    return sum({blob.sha256: blob.bytes for blob in blobs}.values())


def _describe(decoder: Decoder) -> str:
    heads = f"{decoder.attention.heads} heads, {decoder.attention.kv_heads} of kv"
    return f"{decoder.layers} layers, hidden {decoder.hidden}, {heads}, {decoder.vocab} tokens"


def _spell(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _align(facts: dict[str, str]) -> Sequence[str]:
    width = max(map(len, facts))
    return [f"{name.ljust(width)}  {value}" for name, value in facts.items()]
