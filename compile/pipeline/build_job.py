"""Build job: compiles what is missing of a bundle, runs self-tests, publishes the bundle and shares its executables."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dflash_aot.cache.bundle.manifest import SCHEMA, DraftModel, Entry, Manifest, SelfTest, TargetModel, read_manifest
from dflash_aot.cache.bundle.manifest_checks import check_consistent
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.weight_recipe import PLAIN, CheckpointRole
from dflash_aot.cache.environment import Environment, read_host_environment
from dflash_aot.cache.errors import BadInput, BuildFailed, CorruptBundle
from dflash_aot.cache.model_config.quantization import WeightConversion
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.units import format_bytes
from dflash_aot.compile.analysis.build_estimate import estimate_build
from dflash_aot.compile.analysis.executable_checks import find_layout_conflicts
from dflash_aot.compile.analysis.memory_plan import CompilerFigures, check_fits, read_compiler_figures
from dflash_aot.compile.pipeline.build_target import BuildTarget
from dflash_aot.compile.pipeline.compilation_manager import Compilation, compile_all
from dflash_aot.compile.pipeline.compiler_pool import check_ray_target, open_compiler_pool
from dflash_aot.compile.pipeline.deployment import Deployment
from dflash_aot.compile.pipeline.observer import BuildObserver
from dflash_aot.compile.pipeline.self_tests import run_self_tests
from dflash_aot.compile.programs.program_source import ProgramSource


@dataclass(frozen=True)
class BuildJob:
    """What is built, from what, and where.

    Attributes:
        target: the target's reference and facts, for the manifest.
        draft: likewise the draft's.
        deployment: the pair with its grid and devices.
        source: the programs.
        build_target: the devices to compile for.
        store: the bundle's directory.
        jobs: executables compiled at a time; None: see `choose_jobs`.
        self_test: whether new executables are called once.
        records: by label, earlier self-test results that new executables must reproduce.
        known: a manifest whose executables the store holds, with build records or without.
        ray_address: the Ray cluster that compiles; None: this machine does.
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
    jobs: int | None = None
    self_test: bool = True
    records: Mapping[str, SelfTest] = field(default_factory=dict)
    known: Manifest | None = None
    ray_address: str | None = None
    conversions: Mapping[CheckpointRole, WeightConversion] = field(default_factory=dict)
    names_formats: bool = False
    manifest_hash: str | None = None


def run_build(job: BuildJob, observer: BuildObserver, shared: SharedStore | None = None) -> Compilation:
    """Builds what is missing, self-tests it, publishes the bundle and shares its executables.

    Raises BuildFailed, BadInput.
    """
    if job.ray_address is not None:
        check_ray_target(job.build_target)
    check_memory(job.deployment, observer)
    with job.store.open_for_building():
        check_unchanged(job)
        check_disk_space(job)
        if job.known:
            job.store.restore_records(job.known)
        with open_compiler_pool(job.build_target, job.store, job.jobs, job.ray_address, observer) as pool:
            observer.on_phase("compile", len(job.source.signatures))
            try:
                compilation = compile_all(job.source, pool, job.store, observer, shared)
            finally:
                observer.on_phase_end("compile")
        if conflicts := find_layout_conflicts(compilation.entries):
            lines = (f"  {conflict}" for conflict in conflicts)
            raise BuildFailed("executables do not fit together, nothing is published:", *lines)
        check_memory(job.deployment, observer, read_compiler_figures(compilation.entries))
        manifest = _describe_bundle(job, pool.environment, compilation)
        check_consistent(job.store.bundle, manifest)
        entries = run_self_tests(job.store, manifest, compilation.compiled, job.records, job.self_test, observer)
        job.store.publish(msgspec.structs.replace(manifest, entries=entries))
    if shared:
        for entry in entries:
            shared.add(job.store, entry)
    return msgspec.structs.replace(compilation, entries=entries)


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
    if built is not None:
        host = msgspec.structs.asdict(read_host_environment(built.platform))
        if host != {name: getattr(built, name) for name in host}:
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


def check_memory(deployment: Deployment, observer: BuildObserver, measured: CompilerFigures | None = None) -> None:
    """Raises BuildFailed if the devices lack the memory for sure; warns if an estimate says so, see `check_fits`."""
    grid, chip = deployment.grid, deployment.chip
    if chip is None:
        return
    doubt = check_fits(deployment.programs, grid, deployment.devices, chip, deployment.positions, measured)
    if doubt:
        observer.on_warning(doubt)


def _describe_bundle(job: BuildJob, environment: Environment, compilation: Compilation) -> Manifest:
    deployment, programs = job.deployment, job.deployment.programs
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
        entries=tuple(bound_entries(deployment, compilation.entries)),
        weight_formats=msgspec.UNSET if programs.formats == PLAIN and not job.names_formats else programs.formats,
    )


def bound_entries(deployment: Deployment, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Entries with the least time of each call on a TPU; unchanged for devices without figures."""
    for entry in entries:
        if deployment.chip:
            bound = deployment.roofline.cost(entry.signature).bound_seconds(deployment.chip)
            cost = msgspec.structs.replace(entry.cost, bound_seconds=bound)
            entry = msgspec.structs.replace(entry, cost=cost)
        yield entry
