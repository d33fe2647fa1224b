"""`dflash-bundle inspect` and `diff`: what a bundle holds, and how two bundles differ. JAX is not imported."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dflash_aot.bin.command_line import format_table, print_json, print_lines
from dflash_aot.bin.report_parts import (
    ExecutableTime,
    describe_decoder,
    describe_draft,
    describe_target,
    list_times,
    report_executable,
    tabulate_times,
)
from dflash_aot.cache.bundle.manifest import (
    Blob,
    Entry,
    Manifest,
    can_rebuild,
    list_remedies,
    parse_manifest,
    read_manifest,
    read_manifest_bytes,
    rebuild_command,
)
from dflash_aot.cache.bundle.manifest_signature import Signers, list_signers
from dflash_aot.cache.bundle.verification import check_consistent
from dflash_aot.cache.bundle_spec import (
    DraftModel,
    FieldChange,
    TargetModel,
    compare_values,
    represent_as_json,
)
from dflash_aot.cache.environment import Environment, EnvironmentDifference, compare_with_host
from dflash_aot.cache.errors import BadCheckpoint, IncompatibleBundle
from dflash_aot.cache.files.locations import locate_checkpoint
from dflash_aot.cache.printable import format_bytes
from dflash_aot.cache.weight_recipe import WeightFormats
from dflash_aot.runtime.weights.checkpoint_pair import read_end_tokens

PROGRAM_HEADER = ("program", "executables", "size", "largest", "temporaries")
DIFFERENT = 1  # exit code of two bundles that differ, as diff(1) has it
# Characters of a value in the text report of `diff`; --json has the whole value.
LONGEST_VALUE = 200


class ProgramSummary(msgspec.Struct, frozen=True):
    """All executables of one program.

    Attributes:
        program: name of the program.
        executables: how many executables it has.
        bytes: size of all their files.
        largest: size of the largest file.
        temporaries: most bytes of temporary buffers that one of them allocates on a device.
    """

    program: str
    executables: int
    bytes: int
    largest: int
    temporaries: int


class DeviceMemory(msgspec.Struct, frozen=True):
    """Bytes that a bundle takes on each device.

    Attributes:
        weights: the weights of both models.
        state: the state arrays of all slots (kv, sampling state).
        temporaries: the temporary buffers of the executable that needs most.
    """

    weights: int
    state: int
    temporaries: int


class Compatibility(msgspec.Struct, frozen=True):
    """Whether this machine can serve the bundle, as far as that is known before JAX starts.

    Attributes:
        fits: no difference was found.
        differences: fields of the environment that differ here.
        known_only_when_jax_starts: fields that could not be compared.
        rebuild_from_programs: command that recompiles the bundle's own programs for this machine; None where that
            does not help, because the devices are others.
        rebuild_from_checkpoints: command that builds the bundle anew.
        remedies: what makes bundle and machine fit, for people.
    """

    fits: bool
    differences: tuple[EnvironmentDifference, ...]
    known_only_when_jax_starts: tuple[str, ...]
    rebuild_from_programs: str | None
    rebuild_from_checkpoints: str
    remedies: tuple[str, ...]


class BundleInspection(msgspec.Struct, frozen=True):
    """The report of `inspect`.

    Attributes:
        bundle: its directory, as given.
        schema: version of the manifest's format.
        target: reference and facts of the target.
        end_tokens: the target's tokens that end an answer, and the files that name them, as a text; None where the
            target is not on this machine, or its files cannot be read.
        draft: reference and facts of the draft.
        grid: the grid, as --buckets takes it.
        dtype: dtype of arithmetic, and of weights that are plain.
        weight_formats: the format of each model's linear layers.
        sampling: kinds of verification that were built.
        programs: a summary for each program.
        executables: how many executables there are.
        bytes: size of the executables' files; a file that several executables share counts once.
        program_bytes: size of the StableHLO programs that they were compiled from.
        memory_per_device: what serving allocates on each device.
        times: estimated times of the executables, of a bundle for a TPU.
        environment: machine and library versions that the bundle was built for.
        signers: keys named in the signature file, not verified; None without such a file.
        compatibility: whether this machine can serve the bundle.
    """

    bundle: str
    schema: int
    target: TargetModel
    end_tokens: str | None
    draft: DraftModel
    grid: str
    dtype: str
    weight_formats: WeightFormats
    sampling: tuple[str, ...]
    programs: tuple[ProgramSummary, ...]
    executables: int
    bytes: int
    program_bytes: int
    memory_per_device: DeviceMemory
    times: tuple[ExecutableTime, ...]
    environment: Environment
    signers: Signers | None
    compatibility: Compatibility


# -- inspect


def report_inspection(bundle: Path, as_json: bool, executable: str | None = None) -> int:
    """Prints the report of `inspect`; returns 0 if this machine can serve the bundle, else the exit code for that.

    With `executable`, the label of one, prints its longest operations instead, and returns 0.
    """
    content = read_manifest_bytes(bundle)
    manifest = parse_manifest(bundle, content)
    check_consistent(bundle, manifest)
    if executable is not None:
        return report_executable(bundle, manifest, executable, as_json)
    inspection = inspect_bundle(bundle, manifest, list_signers(bundle, content))
    if as_json:
        print_json(inspection)
    else:
        print_lines(*format_inspection(inspection))
    return 0 if inspection.compatibility.fits else IncompatibleBundle.exit_code


def inspect_bundle(bundle: Path, manifest: Manifest, signers: Signers | None) -> BundleInspection:
    """Summarizes a manifest. Of other files only the target's configs and tokenizer are read, if they are here."""
    programs = summarize_programs(manifest)
    environment = manifest.environment
    differences, unknown = compare_with_host(environment)
    rebuilt = rebuild_command(bundle) if can_rebuild(environment, differences) else None
    anew = manifest.build_command(bundle)
    remedies = list_remedies(bundle, environment, differences, anew) if differences else []
    return BundleInspection(
        bundle=str(bundle),
        schema=manifest.schema,
        target=manifest.target,
        end_tokens=describe_end_tokens(manifest),
        draft=manifest.draft,
        grid=str(manifest.grid),
        dtype=manifest.dtype,
        weight_formats=manifest.formats,
        sampling=manifest.sampling,
        programs=programs,
        executables=sum(program.executables for program in programs),
        bytes=_count_bytes(manifest.entries),
        program_bytes=_count_bytes(entry.program for entry in manifest.entries),
        memory_per_device=sum_device_memory(manifest),
        times=list_times(manifest.entries),
        environment=manifest.environment,
        signers=signers,
        compatibility=Compatibility(
            fits=not differences,
            differences=tuple(differences),
            known_only_when_jax_starts=tuple(unknown),
            rebuild_from_programs=rebuilt,
            rebuild_from_checkpoints=anew,
            remedies=tuple(remedies),
        ),
    )


def describe_end_tokens(manifest: Manifest) -> str | None:
    """The tokens that end an answer of the target; None where its files are not here, or cannot be read."""
    try:
        directory = locate_checkpoint(manifest.target.reference, "target")
        return str(read_end_tokens(directory, manifest.target.facts.decoder.vocab))
    except BadCheckpoint:
        return None


def summarize_programs(manifest: Manifest) -> tuple[ProgramSummary, ...]:
    """A summary for each program, in the order in which the manifest names them first."""
    summaries = []
    for program in dict.fromkeys(entry.signature.program for entry in manifest.entries):
        entries = [entry for entry in manifest.entries if entry.signature.program == program]
        sizes = [entry.bytes for entry in entries]
        temporaries = max(entry.memory.temporaries for entry in entries)
        summaries.append(ProgramSummary(program, len(entries), sum(sizes), max(sizes), temporaries))
    return tuple(summaries)


def sum_device_memory(manifest: Manifest) -> DeviceMemory:
    """Adds up what the manifest says of arrays and executables."""
    devices = manifest.environment.device_count
    state = {array.name for array in manifest.state}
    arrays = manifest.arrays_by_name().values()
    return DeviceMemory(
        weights=sum(array.shard_bytes(devices) for array in arrays if array.name not in state),
        state=sum(array.shard_bytes(devices) for array in manifest.state),
        temporaries=max((entry.memory.temporaries for entry in manifest.entries), default=0),
    )


def format_inspection(inspection: BundleInspection) -> list[str]:
    """The report of `inspect` as lines of text."""
    memory = inspection.memory_per_device
    devices = inspection.environment.device_count
    target = inspection.target
    draft = inspection.draft
    facts = {
        "target": f"{target.reference} ({describe_target(target.facts)})",
        "draft": f"{draft.reference} ({describe_decoder(draft.facts.decoder)})",
        "ends at": inspection.end_tokens or "unknown: the target is not on this machine",
        "drafting": describe_draft(draft.facts),
        "grid": inspection.grid,
        "dtype": inspection.dtype,
        "weights": format_weights(inspection.weight_formats, inspection.dtype),
        "sampling": ", ".join(inspection.sampling),
        "memory": f"on each of {devices} device{'s' * (devices > 1)}: {format_bytes(memory.weights)} weights, "
        f"{format_bytes(memory.state)} state, up to {format_bytes(memory.temporaries)} temporaries",
        "signed": format_signers(inspection.signers),
    }
    rows = [
        (
            row.program,
            str(row.executables),
            *map(format_bytes, (row.bytes, row.largest, row.temporaries)),
        )
        for row in inspection.programs
    ]
    sizes = f"{format_bytes(inspection.bytes)}, and {format_bytes(inspection.program_bytes)} of StableHLO programs"
    environment = msgspec.structs.asdict(inspection.environment)
    sections = (
        [
            f"{inspection.bundle}: schema {inspection.schema}, {inspection.executables} executables, {sizes}"
        ],
        _align(facts),
        format_table(PROGRAM_HEADER, rows),
        tabulate_times(inspection.times),
        [
            "built for",
            *_align(
                {f"  {name}": _join_words(value) for name, value in environment.items() if value}
            ),
        ],
        format_compatibility(inspection.compatibility),
    )
    return [line for lines in sections for line in lines]


def format_weights(formats: WeightFormats, dtype: str) -> str:
    """The formats of linear layers: "int8", or "int8 (draft: bfloat16)" where the draft has another format."""
    target, draft = (dtype if one == "plain" else one for one in (formats.target, formats.draft))
    return target if target == draft else f"{target} (draft: {draft})"


def format_compatibility(compatibility: Compatibility) -> list[str]:
    """Lines that name each difference, and what makes bundle and machine fit."""
    unknown = compatibility.known_only_when_jax_starts
    later = [f"known only when JAX starts: {', '.join(unknown)}"] if unknown else []
    if compatibility.fits:
        return ["this machine: compatible, as far as can be checked without starting JAX", *later]
    return [
        "this machine: incompatible",
        *(
            f"  {one.field}: built for {one.built!r}, here {one.here!r}"
            for one in compatibility.differences
        ),
        *later,
        *compatibility.remedies,
    ]


def format_signers(signers: Signers | None) -> str:
    """The keys that a signature file names, with the reminder that nothing was verified."""
    if signers is None:
        return "no"
    names = ", ".join(key or "a key without a name" for key in signers.keys) or "no key"
    if not signers.current:
        return f"by {names}, but for another manifest: the bundle was rebuilt or changed since"
    return f"by {names}, not verified; dflash-bundle verify --key PUBLIC.pem verifies the signature"


def _count_bytes(blobs: Iterable[Blob]) -> int:
    """Size of the blobs' files; a file that several entries share counts once."""
    return sum({blob.sha256: blob.bytes for blob in blobs}.values())


def _join_words(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _align(facts: dict[str, str]) -> Sequence[str]:
    """A line for each fact, with the values in one column."""
    width = max(map(len, facts))
    return [f"{name.ljust(width)}  {value}" for name, value in facts.items()]


# -- diff


class ExecutableChange(msgspec.Struct, frozen=True):
    """An executable that differs.

    Attributes:
        label: program and sizes.
        what: how it differs.
        parts: the parts of the cache key that differ.
        changes: the fields of the signature that differ.
    """

    label: str
    what: Literal["only in a", "only in b", "another key", "other bytes"]
    parts: tuple[str, ...] = ()
    changes: tuple[FieldChange, ...] = ()


class ManifestDiff(msgspec.Struct, frozen=True):
    """All differences; compile times and compiler reports are not compared.

    Attributes:
        changes: fields.
        executables: executables.
    """

    changes: tuple[FieldChange, ...]
    executables: tuple[ExecutableChange, ...]

    @property
    def equal(self) -> bool:
        """Whether there are no differences."""
        return not (self.changes or self.executables)


def compare_manifests(a: Manifest, b: Manifest) -> ManifestDiff:
    """Returns the differences of two manifests, in the order of the manifest's fields."""
    fields = [
        name for name in Manifest.__struct_fields__ if name not in ("schema", "entries", "digest")
    ]
    changes = [
        change
        for name in fields
        for change in compare_values(name, _read_field(a, name), _read_field(b, name))
    ]
    return ManifestDiff(tuple(changes), tuple(_compare_entries(a, b)))


def _compare_entries(a: Manifest, b: Manifest) -> Iterator[ExecutableChange]:
    ones, others = (
        {entry.signature.label: entry for entry in manifest.entries} for manifest in (a, b)
    )
    for label in dict.fromkeys((*ones, *others)):
        if label not in others:
            yield ExecutableChange(label, "only in a")
        elif label not in ones:
            yield ExecutableChange(label, "only in b")
        elif ones[label].key != others[label].key:
            yield _explain_key(ones[label], others[label], a.environment != b.environment)
        elif ones[label].sha256 != others[label].sha256:
            yield ExecutableChange(label, "other bytes")


def _explain_key(a: Entry, b: Entry, elsewhere: bool) -> ExecutableChange:
    changes = tuple(
        compare_values("", represent_as_json(a.signature), represent_as_json(b.signature))
    )
    differs = {
        "signature": changes,
        "environment": elsewhere,
        "program": a.program.sha256 != b.program.sha256,
        "compiler options": a.compiler_options != b.compiler_options,
    }
    parts = tuple(part for part, found in differs.items() if found)
    return ExecutableChange(a.signature.label, "another key", parts, changes)


def _read_field(manifest: Manifest, name: str) -> Any:
    """Returns a field as JSON represents it; weight formats also where the file leaves them out."""
    return represent_as_json(
        manifest.formats if name == "weight_formats" else getattr(manifest, name)
    )


def report_diff(a: Path, b: Path, as_json: bool) -> int:
    """Prints how two bundles differ; returns 0 if they are equal, else 1."""
    comparison = compare_manifests(read_manifest(a), read_manifest(b))
    if as_json:
        fields = msgspec.to_builtins(comparison)
        print_json({"a": a, "b": b, "equal": comparison.equal, **fields})
    else:
        print_lines(*format_comparison(comparison, str(a), str(b)))
    return 0 if comparison.equal else DIFFERENT


def format_comparison(comparison: ManifestDiff, a: str, b: str) -> list[str]:
    """The report of `diff` as lines of text. Lines with `-` show what `a` has, lines with `+` what `b` has."""
    if comparison.equal:
        return [f"{a} and {b} hold the same executables for the same models and environment"]
    changes = [line for change in comparison.changes for line in _format_change(change)]
    executables = [
        line for executable in comparison.executables for line in _format_executable(executable)
    ]
    return [f"- {a}", f"+ {b}", *changes, *executables]


def _format_change(change: FieldChange, indent: str = "") -> list[str]:
    return [
        f"{indent}{change.field}",
        f"{indent}  - {_shorten(change.a)}",
        f"{indent}  + {_shorten(change.b)}",
    ]


def _format_executable(change: ExecutableChange) -> list[str]:
    sign = {"only in a": "-", "only in b": "+"}.get(change.what, " ")
    reason = f", because of {', '.join(change.parts)}" if change.parts else ""
    return [
        f"{sign} {change.label}: {change.what}{reason}",
        *(line for field in change.changes for line in _format_change(field, "    ")),
    ]


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return (
        text
        if len(text) <= LONGEST_VALUE
        else f"{text[:LONGEST_VALUE]}… (--json has the whole value)"
    )
