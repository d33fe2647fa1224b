"""Precompile: builds the bundle of a checkpoint pair. The library interface of `dflash-precompile`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Unpack

import msgspec

from dflash_aot.cache.bundle.manifest import Entry, read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import check_consistent
from dflash_aot.cache.devices import ignore_jax_switches
from dflash_aot.cache.files.locations import choose_directory
from dflash_aot.cache.model_config.quantization import WeightConversion
from dflash_aot.cache.remote.object_store import open_object_store
from dflash_aot.cache.remote.shared_store import SharedStore, StoreReport
from dflash_aot.cache.weight_recipe import CheckpointRole
from dflash_aot.compile.analysis.executable_checks import find_pool_copies, find_problems
from dflash_aot.compile.analysis.memory_plan import (
    CompilerFigures,
    read_compiler_figures,
    read_estimates,
)
from dflash_aot.compile.pipeline.build_inputs import BuildInputs, read_build_inputs
from dflash_aot.compile.pipeline.build_job import (
    BuildJob,
    BuildKeywords,
    BuildOptions,
    PlanKeywords,
    RebuildKeywords,
    ResolvedRequest,
    list_missing,
    plan,
    read_keywords,
    resolve,
    run_build,
)
from dflash_aot.compile.pipeline.build_target import select_slice
from dflash_aot.compile.pipeline.compilation_manager import BuildObserver, Compilation, choose_jobs
from dflash_aot.compile.pipeline.deployment import Deployment, MemoryEstimate, estimate_memory
from dflash_aot.compile.programs.program import BuildEstimate
from dflash_aot.compile.programs.programs import BundledPrograms, estimate_build


class BuildPlan(msgspec.Struct, frozen=True):
    """What a build will make.

    Attributes:
        bundle: where.
        deployment: the pair with its grid and devices.
        executables: counts by program.
        present: how many the bundle has already, by its build records; a build also compares programs and keys.
        weight_bytes: of all weights, on all devices together.
        state_bytes: of the kv cache and other state, on all devices together.
        jobs: executables compiled at a time.
        estimate: of what is missing: seconds of one core, and bytes on disk; None for a platform without estimates.
        padding_waste: by axis, the largest share of a size that is padding.
        memory: device memory and round times; None for devices without figures.
        conversions: by model, what the bundle makes of the weights of quantized checkpoints.
    """

    bundle: Path
    deployment: Deployment
    executables: dict[str, int]
    present: int
    weight_bytes: int
    state_bytes: int
    jobs: int
    estimate: BuildEstimate | None
    padding_waste: dict[str, float]
    memory: MemoryEstimate | None
    conversions: Mapping[CheckpointRole, WeightConversion]


class BuildReport(msgspec.Struct, frozen=True):
    """What a build made.

    Attributes:
        bundle: where.
        deployment: the pair with its grid and devices.
        entries: all executables, in the grid's order.
        compiled: keys of the executables that this build compiled; the others were found.
        seconds: how long compiling took, found executables included.
        findings: what executables do and should not, see `executable_checks`.
        memory: device memory and round times, from the compiler's figures; None for devices without figures.
        store: what was found in the shared store and written to it, if there is one.
        conversions: by model, what the bundle makes of the weights of quantized checkpoints.
    """

    bundle: Path
    deployment: Deployment
    entries: tuple[Entry, ...]
    compiled: frozenset[str]
    seconds: float
    findings: tuple[str, ...]
    memory: MemoryEstimate | None
    store: StoreReport | None = None
    conversions: Mapping[CheckpointRole, WeightConversion] = msgspec.field(default_factory=dict)


@ignore_jax_switches()
def precompile(
    target: str | Path,
    draft: str | Path,
    bundle: str | Path,
    *,
    observer: BuildObserver | None = None,
    **keywords: Unpack[BuildKeywords],
) -> BuildReport:
    """Builds what is missing of the bundle of a target and its draft, and publishes the bundle.

    Needs only the two config.json. Prints nothing, and reads no environment variables but those that JAX, its compilers
    and the libraries of `store` read. Starts JAX for the platform, in this process.

    Args:
        target: the target's directory, its hub id in the local cache, or "embedded".
        draft: its DFlash draft: a directory, a hub id or "embedded".
        bundle: the directory to build in. Executables that it holds already are not compiled again.
        observer: receives progress; None: ignored.
        keywords: see `BuildKeywords`.

    Raises:
        BadInput: arguments that cannot be used. Its subclasses are BadCheckpoint and StoreFailed.
        BuildFailed: executables that could not be built, with all reasons.
    """
    observer = observer or BuildObserver()
    request, options = read_keywords(target, draft, keywords)
    job = plan(resolve(request, _open_bundle(bundle), observer), options, observer)
    # The nodes of a Ray cluster may have other versions and flags than this machine.
    inputs = read_build_inputs(job.build_target) if options.ray_address is None else None
    return _run(job, observer, inputs)


@ignore_jax_switches()
def plan_build(
    target: str | Path,
    draft: str | Path,
    bundle: str | Path,
    *,
    observer: BuildObserver | None = None,
    **keywords: Unpack[PlanKeywords],
) -> BuildPlan:
    """What `precompile` would build, and estimates of time and memory; compiles and writes nothing.

    Arguments and errors are those of `precompile`.
    """
    if unknown := sorted(keywords.keys() - PlanKeywords.__annotations__):
        raise TypeError(f"plan_build() got unexpected keyword arguments: {', '.join(unknown)}")
    observer = observer or BuildObserver()
    request, options = read_keywords(target, draft, keywords)
    job = plan(resolve(request, _open_bundle(bundle), observer), options, observer)
    return plan_executables(job)


@ignore_jax_switches()
def rebuild(
    bundle: str | Path,
    into: str | Path | None = None,
    *,
    require_signature: str | Path | None = None,
    observer: BuildObserver | None = None,
    **options: Unpack[RebuildKeywords],
) -> BuildReport:
    """Compiles a bundle's programs again, with this machine's compiler: the same grid, for the same kind of devices.

    Needs no checkpoint. Each new executable must compute what the old executable computed.

    Args:
        bundle: the bundle's directory.
        into: the directory to build in; None: `bundle`.
        require_signature: the file of a public key, PEM: only a manifest that its owner signed is read, and of the
            executables that are there only those of this manifest are taken.
        observer: receives progress; None: ignored.
        options: see `RebuildKeywords`.

    Raises:
        MissingBundle: there is no bundle.
        CorruptBundle: the bundle's manifest or programs cannot be used.
        BadInput, BuildFailed: as `precompile` does.
    """
    directory = choose_directory(str(bundle), f"Fetch it: dflash-bundle fetch {bundle}")
    store = Store(directory) if into is None else _open_bundle(into)
    manifest_hash = store.hash_manifest()
    key = Path(require_signature) if require_signature is not None else None
    manifest = read_manifest(directory, key)
    check_consistent(directory, manifest)
    if key:
        store.trust_only(manifest.entries)  # build records here may be forged
    observer = observer or BuildObserver()
    programs = BundledPrograms(manifest, Store(directory))
    programs.check_readable()
    asked = ResolvedRequest(
        spec=manifest,
        build_target=select_slice(manifest.slice),
        store=store,
        manifest_hash=manifest_hash,
        programs=programs,
    )
    return _run(plan(asked, BuildOptions(exact=True, **options), observer), observer)


def _open_bundle(bundle: str | Path) -> Store:
    """The directory to build in. Raises BadInput for a URL."""
    remedy = f"Build in a directory, then push it: dflash-bundle push DIR {bundle}"
    return Store(choose_directory(str(bundle), remedy))


def _run(job: BuildJob, observer: BuildObserver, inputs: BuildInputs | None = None) -> BuildReport:
    with _open_shared_store(job.options.store, observer) as shared:
        compilation = run_build(job, observer, shared, inputs)
    return report_compilation(job, compilation, shared.report() if shared else None)


def _open_shared_store(
    store: str | None, observer: BuildObserver
) -> AbstractContextManager[SharedStore | None]:
    """Raises StoreFailed before anything is compiled."""
    if store is None:
        return nullcontext()
    shared = SharedStore(open_object_store(store))
    if shared.unwritable:
        observer.on_warning(f"{shared.unwritable}: executables that are built here are not shared")
    return shared


# -- plan and report


def plan_executables(job: BuildJob) -> BuildPlan:
    """The plan of a job. Estimated times are those of the bundle that is there."""
    deployment = job.deployment
    programs = deployment.programs
    grid = deployment.grid
    signatures = job.source.signatures
    missing = list_missing(job)
    estimates = read_estimates(job.built.entries) if job.built else {}
    return BuildPlan(
        bundle=job.store.bundle,
        deployment=deployment,
        executables=dict(Counter(signature.program for signature in signatures)),
        present=len(signatures) - len(missing),
        weight_bytes=sum(recipe.bytes for recipe in job.source.recipes),
        state_bytes=sum(array.bytes for array in job.source.state),
        jobs=choose_jobs(job.build_target, job.options.jobs),
        estimate=estimate_build(missing, programs.pair, deployment.platform),
        padding_waste={
            axis: find_padding_waste(getattr(grid, axis)) for axis in ("batch", "length", "prefill")
        },
        memory=estimate_memory(deployment, job.options.tau, CompilerFigures(seconds=estimates)),
        conversions=job.conversions,
    )


def report_compilation(
    job: BuildJob, compilation: Compilation, store: StoreReport | None = None
) -> BuildReport:
    """The report of a finished build; `store` is that of the shared store."""
    deployment = job.deployment
    figures = read_compiler_figures(compilation.entries)
    return BuildReport(
        bundle=job.store.bundle,
        deployment=deployment,
        entries=compilation.entries,
        compiled=compilation.compiled,
        seconds=compilation.seconds,
        findings=tuple(_list_findings(deployment, compilation.entries)),
        memory=estimate_memory(deployment, job.options.tau, figures),
        store=store,
        conversions=job.conversions,
    )


def find_padding_waste(sizes: Sequence[int]) -> float:
    """The share of a size that is padding for a request one larger than the size below, at worst; 0 for one size."""
    return max(
        (1 - (small + 1) / large for small, large in zip(sizes[:-1], sizes[1:], strict=True)),
        default=0.0,
    )


def _list_findings(deployment: Deployment, entries: Sequence[Entry]) -> list[str]:
    programs = deployment.programs
    known = deployment.programs.arrays_by_name(deployment.grid)

    def find_in(entry: Entry) -> list[str]:
        if deployment.platform != "tpu":
            return find_pool_copies(entry, known, deployment.devices)
        return find_problems(
            entry, known, deployment.devices, programs.collectives(entry.signature)
        )

    return [problem for entry in entries for problem in find_in(entry)]
