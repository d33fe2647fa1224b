"""Build job: compiles what is missing of a bundle, runs self-tests, publishes the bundle and shares its executables."""

import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import (
    SCHEMA,
    DraftModel,
    Entry,
    Manifest,
    SelfTest,
    TargetModel,
    read_manifest,
)
from dflash_aot.cache.bundle.quarantine import QUARANTINE_DIRECTORY
from dflash_aot.cache.bundle.self_test import (
    SelfTestResult,
    SelfTests,
    is_comparable,
    is_shared,
    set_up_self_tests,
)
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import check_consistent
from dflash_aot.cache.environment import Environment, read_host_environment
from dflash_aot.cache.errors import BadInput, BuildFailed, CorruptBundle, IncompatibleBundle
from dflash_aot.cache.key import choose_compiler_options
from dflash_aot.cache.model_config.quantization import WeightConversion
from dflash_aot.cache.printable import format_bytes
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.weight_recipe import PLAIN, CheckpointRole
from dflash_aot.compile.analysis.executable_checks import find_layout_conflicts
from dflash_aot.compile.analysis.memory_plan import (
    CompilerFigures,
    check_fits,
    read_compiler_figures,
)
from dflash_aot.compile.pipeline.build_inputs import BuildInputs, find_changed_inputs
from dflash_aot.compile.pipeline.build_target import BuildTarget, TargetDevices
from dflash_aot.compile.pipeline.compilation_manager import (
    Compilation,
    check_ray_target,
    compile_all,
    open_compiler_pool,
)
from dflash_aot.compile.pipeline.deployment import Deployment, estimate_build
from dflash_aot.compile.pipeline.observer import BuildObserver, Progress
from dflash_aot.compile.programs.program_source import ProgramSource

# -- self-tests after a build: every new executable is called once, and its results are recorded or compared

MEMORY = Path("/proc/meminfo")


def run_self_tests(
    store: Store,
    manifest: Manifest,
    compiled: frozenset[str],
    records: Mapping[str, SelfTest],
    enabled: bool,
    observer: BuildObserver,
) -> tuple[Entry, ...]:
    """The manifest's entries, each with the record of its results where there is one.

    Calls the executables that this build compiled, and those without a comparable record. Where they cannot be called
    here, tells the observer why.

    Args:
        compiled: keys of the executables that this build compiled.
        records: by label, earlier results of the same programs that new executables must reproduce.
        enabled: False calls nothing.

    Raises BuildFailed for executables with wrong results; they are quarantined.
    """
    entries = [_add_record(entry, records) for entry in manifest.entries]
    untested = [
        entry for entry in entries if entry.key in compiled or not is_comparable(entry.self_test)
    ]
    if not enabled or not untested:
        return tuple(entries)
    if obstacle := _find_obstacle(manifest, store.bundle):
        observer.on_info(f"executables were not called: {obstacle}")
        return tuple(entries)
    observer.on_phase("self-test", len(untested))
    try:
        tested = _test_all(store, manifest, untested, observer)
    finally:
        observer.on_phase_end("self-test")
    return tuple(tested.get(entry.key, entry) for entry in entries)


def _add_record(entry: Entry, records: Mapping[str, SelfTest]) -> Entry:
    return msgspec.structs.replace(
        entry, self_test=entry.self_test or records.get(entry.signature.label)
    )


def _find_obstacle(manifest: Manifest, bundle: Path) -> str | None:
    """An accelerator is held by this process or is not attached; a CPU host may not have the memory."""
    if manifest.environment.platform != "cpu":
        return f"on the host that serves, run dflash-bundle verify {shlex.quote(str(bundle))} --deep --record"
    needed = sum(array.bytes for array in manifest.arrays_by_name().values()) + sum(
        one.bytes for one in manifest.state
    )
    available = available_memory()
    if available is not None and needed > available:
        return f"that takes {format_bytes(needed)} of memory, and {format_bytes(available)} are available"
    return None


def available_memory() -> int | None:
    """Bytes; None where the system does not tell."""
    try:
        lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _test_all(
    store: Store, manifest: Manifest, entries: list[Entry], observer: BuildObserver
) -> dict[str, Entry]:
    """Tested entries by key. Raises BuildFailed."""
    tested = {}
    failures: list[tuple[Entry, SelfTestResult]] = []
    with SelfTests(set_up_self_tests(store.bundle, manifest)) as self_tests:
        for done, entry in enumerate(entries):
            observer.on_executable(Progress(done, len(entries), entry.signature.label))
            try:
                result = self_tests.run(entry)
            except IncompatibleBundle as error:  # memory is short
                observer.on_info(f"no more executables were called: {error}")
                break
            if result.fault:
                failures.append((entry, result))
            else:
                record = entry.self_test if result.compared else result.record
                tested[entry.key] = msgspec.structs.replace(entry, self_test=record)
                store.write_record(tested[entry.key])
            observer.on_executable(Progress(done + 1, len(entries), entry.signature.label))
    if failures:
        raise _refuse_build(store, failures, len(failures) + len(tested))
    return tested


def _refuse_build(
    store: Store, failures: Sequence[tuple[Entry, SelfTestResult]], called: int
) -> BuildFailed:
    """Quarantines the executables with a fault, unless all have one, and returns the error."""
    place = f"they are quarantined in {store.bundle / QUARANTINE_DIRECTORY}"
    if is_shared(len(failures), called):
        place = "all of them did, so that the cause is probably this machine's environment, and none is quarantined"
    else:
        for entry, result in failures:
            assert result.fault is not None
            store.quarantine(entry, result.fault, result.reason)
    return BuildFailed(
        f"{len(failures)} of {called} executables failed their self-test. Nothing is published; {place}:",
        *(f"  {entry.signature.label}: {result.reason}" for entry, result in failures),
    )


# -- the build

MAX_NAMED_INPUTS = 3  # in a message


@dataclass(frozen=True)
class BuildOptions:
    """How a build works. No option changes what is built.

    Attributes:
        jobs: executables compiled at a time; None: see `choose_jobs`.
        self_test: whether new executables are called once.
        ray_address: the Ray cluster that compiles; None: this machine does.
        retrace: whether every program is traced, even if nothing has changed since the bundle was built.
    """

    jobs: int | None = None
    self_test: bool = True
    ray_address: str | None = None
    retrace: bool = False


@dataclass(frozen=True)
class BuildJob:
    """What is built, from what, and where.

    Attributes:
        target: the target's reference and facts, for the manifest.
        draft: the draft's reference and facts, for the manifest.
        deployment: the pair with its grid and devices.
        source: the programs.
        build_target: the devices to compile for.
        store: the bundle's directory.
        options: how the build works.
        records: by label, earlier self-test results that new executables must reproduce.
        known: a manifest whose executables the store holds, with build records or without.
        conversions: by model, what the bundle makes of the weights of quantized checkpoints.
        names_formats: the manifest names the weight formats even if all are plain: a quantized checkpoint has another
            default.
        manifest_hash: sha256 of the bundle's manifest when the job was planned, see `Store.hash_manifest`.
    """

    target: TargetModel
    draft: DraftModel
    deployment: Deployment
    source: ProgramSource
    build_target: BuildTarget
    store: Store
    options: BuildOptions = BuildOptions()
    records: Mapping[str, SelfTest] = field(default_factory=dict)
    known: Manifest | None = None
    conversions: Mapping[CheckpointRole, WeightConversion] = field(default_factory=dict)
    names_formats: bool = False
    manifest_hash: str | None = None


def run_build(
    job: BuildJob,
    observer: BuildObserver,
    shared: SharedStore | None = None,
    inputs: BuildInputs | None = None,
) -> Compilation:
    """Builds what is missing, self-tests it, publishes the bundle and shares its executables.

    `inputs`: what the job's programs are made from. If the bundle was made from the same inputs for the same job,
    nothing is traced. Without inputs every program is traced, and no inputs are recorded.

    Raises BuildFailed, BadInput.
    """
    if job.options.ray_address is not None:
        check_ray_target(job.build_target)
    check_memory(job.deployment, observer)
    with job.store.open_for_building():
        check_unchanged(job)
        found = (
            None
            if inputs is None or job.options.retrace
            else _find_complete_bundle(job, inputs, observer)
        )
        environment, compilation = found or _compile(job, observer, shared)
        if conflicts := find_layout_conflicts(compilation.entries):
            lines = (f"  {conflict}" for conflict in conflicts)
            raise BuildFailed("executables do not fit together, nothing is published:", *lines)
        check_memory(job.deployment, observer, read_compiler_figures(compilation.entries))
        manifest = _describe_bundle(job, environment, compilation.entries)
        check_consistent(job.store.bundle, manifest)
        entries = run_self_tests(
            job.store, manifest, compilation.compiled, job.records, job.options.self_test, observer
        )
        job.store.publish(msgspec.structs.replace(manifest, entries=entries))
        if inputs is not None:
            job.store.write_build_inputs(inputs)
    if shared:
        for entry in entries:
            shared.add(job.store, entry)
    return msgspec.structs.replace(compilation, entries=entries)


def _compile(
    job: BuildJob, observer: BuildObserver, shared: SharedStore | None
) -> tuple[Environment, Compilation]:
    """Makes every program, and compiles those without an executable."""
    check_disk_space(job)
    if job.known:
        job.store.restore_records(job.known)
    options = job.options
    with open_compiler_pool(
        job.build_target, job.store, options.jobs, options.ray_address, observer
    ) as pool:
        observer.on_phase("compile", len(job.source.signatures))
        try:
            return pool.environment, compile_all(job.source, pool, job.store, observer, shared)
        finally:
            observer.on_phase_end("compile")


def _find_complete_bundle(
    job: BuildJob, inputs: BuildInputs, observer: BuildObserver
) -> tuple[Environment, Compilation] | None:
    """The executables of a bundle that this job would build again; None if anything differs, or cannot be compared.

    What the job asks for is compared with the manifest; what the programs are made from, with the recorded inputs; the
    files, with their hashes.
    """
    began = time.monotonic()
    recorded = job.store.read_build_inputs()
    if recorded is None:
        return None
    try:
        manifest = read_manifest(job.store.bundle)
    except CorruptBundle:  # one of another version of this project is that, too
        return None
    if not _asks_for(job, manifest):
        return None
    if changed := find_changed_inputs(recorded, inputs):
        names = ", ".join(changed[:MAX_NAMED_INPUTS])
        more = f" and {len(changed) - MAX_NAMED_INPUTS} more" if changed[MAX_NAMED_INPUTS:] else ""
        observer.on_info(
            f"every program is traced again, because of changes since the last build: {names}{more}"
        )
        return None
    if flawed := job.store.find_flawed_file(manifest.entries):
        observer.on_info(f"every program is traced again, because {flawed} is missing or corrupt")
        return None
    observer.on_phase("compile", len(manifest.entries))
    for done, entry in enumerate(manifest.entries, 1):
        observer.on_executable(
            Progress(done, len(manifest.entries), entry.signature.label, entry=entry)
        )
    observer.on_phase_end("compile")
    return manifest.environment, Compilation(
        manifest.entries, frozenset(), time.monotonic() - began
    )


def _asks_for(job: BuildJob, manifest: Manifest) -> bool:
    """Whether the job would publish this manifest, if its programs are the same."""
    environment = manifest.environment
    entries = manifest.entries
    if isinstance(job.build_target, TargetDevices):
        if environment != job.build_target.environment:
            return False
    elif (environment.platform, environment.topology) != (
        "tpu",
        job.build_target.name,
    ) or not _is_of_host(environment):
        return False
    options = (choose_compiler_options(environment, entry.signature.program) for entry in entries)
    return (
        [entry.signature for entry in entries] == list(job.source.signatures)
        and [entry.compiler_options for entry in entries] == list(options)
        and _describe_bundle(job, environment, entries)
        == msgspec.structs.replace(manifest, digest="")
    )


def _is_of_host(built: Environment) -> bool:
    """Whether an environment has this machine's versions and flags."""
    host = msgspec.structs.asdict(read_host_environment(built.platform))
    return host == {name: getattr(built, name) for name in host}


def check_unchanged(job: BuildJob) -> None:
    """Raises BuildFailed where another build published the bundle since this one was planned: it would be lost."""
    if job.store.hash_manifest() != job.manifest_hash:
        raise BuildFailed(
            f"{job.store.bundle} changed while this build was planned: another build may have added to it. Try again"
        )


def list_missing(job: BuildJob, signatures: Sequence[Signature]) -> list[Signature]:
    """The signatures without a build record; all of them where another compiler or machine built the bundle."""
    try:
        built = read_manifest(job.store.bundle).environment
    except CorruptBundle:  # a killed build has records and no manifest; MissingBundle is one
        built = None
    if built is not None and not _is_of_host(built):
        return list(signatures)
    stored = job.store.list_stored(signatures)
    return [signature for signature in signatures if signature not in stored]


def check_disk_space(job: BuildJob) -> None:
    """Raises BadInput where the disk has less free space than the missing executables are estimated to take."""
    missing = list_missing(job, job.source.signatures)
    estimate = estimate_build(missing, job.deployment.programs.pair, job.deployment.platform)
    free = shutil.disk_usage(job.store.bundle).free
    if estimate and estimate.bytes > free:
        raise BadInput(
            f"{job.store.bundle}: {len(missing)} executables take about {format_bytes(estimate.bytes)} on disk, and "
            f"{format_bytes(free)} are free there. Make room, name another directory with --bundle, or a smaller grid"
        )


def check_memory(
    deployment: Deployment, observer: BuildObserver, measured: CompilerFigures | None = None
) -> None:
    """Raises BuildFailed if the devices lack the memory for sure; warns if an estimate says so, see `check_fits`."""
    grid = deployment.grid
    chip = deployment.chip
    if chip is None:
        return
    doubt = check_fits(
        deployment.programs, grid, deployment.devices, chip, deployment.positions, measured
    )
    if doubt:
        observer.on_warning(doubt)


def _describe_bundle(job: BuildJob, environment: Environment, entries: Sequence[Entry]) -> Manifest:
    deployment = job.deployment
    programs = job.deployment.programs
    return Manifest(
        schema=SCHEMA,
        environment=environment,
        target=job.target,
        draft=job.draft,
        dtype=deployment.dtype,
        sampling=programs.pair.sampling,
        grid=deployment.grid,
        state=job.source.state,
        weights=job.source.recipes,
        entries=tuple(bound_entries(deployment, entries)),
        weight_formats=msgspec.UNSET
        if programs.formats == PLAIN and not job.names_formats
        else programs.formats,
    )


def bound_entries(deployment: Deployment, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Entries with the least time of each call on a TPU; unchanged for devices without figures."""
    for entry in entries:
        if deployment.chip:
            bound = deployment.roofline.cost(entry.signature).bound_seconds(deployment.chip)
            cost = msgspec.structs.replace(entry.cost, bound_seconds=bound)
            entry = msgspec.structs.replace(entry, cost=cost)
        yield entry
