"""Build job: a bundle from a request in four steps: resolve, plan, build, publish."""

import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from dflash_aot.cache.bundle.manifest import Entry, Manifest, read_manifest
from dflash_aot.cache.bundle.self_test import is_comparable
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import check_consistent
from dflash_aot.cache.bundle_spec import (
    BundleSpec,
    DraftModel,
    PlannedBundle,
    Slice,
    TargetModel,
    choose_formats,
    choose_grid,
)
from dflash_aot.cache.environment import Environment, read_host_environment
from dflash_aot.cache.errors import (
    BadInput,
    BuildFailed,
    CorruptBundle,
    MissingBundle,
    NewerBundle,
)
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint
from dflash_aot.cache.grid import Grid, find_named
from dflash_aot.cache.model_config.architecture import MixtureOfExperts, Target
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.quantization import (
    Quantization,
    WeightConversion,
    read_quantization,
)
from dflash_aot.cache.model_config.speculative_config import (
    BY_BATCH_SIZE,
    KRanges,
    SpeculativeConfig,
    check_k_ranges,
    check_largest_k,
)
from dflash_aot.cache.model_config.speculators_draft import find_ambiguity
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.printable import format_bytes
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.cache.sampling_state import DEFAULT_SAMPLING, check_sampling_kinds
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.weight_recipe import PLAIN, CheckpointRole
from dflash_aot.compile.analysis.executable_checks import find_layout_conflicts
from dflash_aot.compile.analysis.memory_plan import (
    CompilerFigures,
    check_fits,
    read_compiler_figures,
)
from dflash_aot.compile.models.backend import choose_device_kernels
from dflash_aot.compile.pipeline.build_inputs import BuildInputs, find_changed_inputs
from dflash_aot.compile.pipeline.build_self_tests import run_self_tests
from dflash_aot.compile.pipeline.build_target import (
    BuildTarget,
    TargetDevices,
    choose_build_target,
    find_chip,
    name_slice,
)
from dflash_aot.compile.pipeline.compilation_manager import (
    BuildObserver,
    Compilation,
    Progress,
    check_ray_target,
    compile_all,
    open_compiler_pool,
)
from dflash_aot.compile.pipeline.deployment import (
    Deployment,
    check_tau,
    check_unquantized,
    plan_conversions,
    plan_deployment,
)
from dflash_aot.compile.programs.programs import (
    BundledPrograms,
    ProgramSource,
    TracedPrograms,
    choose_options,
    estimate_build,
)

MAX_NAMED_INPUTS = 3  # in a message


# -- requests


class PlanKeywords(TypedDict, total=False):
    """Keyword arguments of `plan_build`, and of `precompile`.

    Attributes:
        grid: the grid; or text such as "batch=1,4 length=256,1024 k=0,7,15 prefill=64,256", or the name of a .toml with
            these keys; None: a default for the pair.
        num_speculative_tokens: the largest k of the default grid; None: as the draft's config says.
        num_speculative_tokens_per_batch_size: (first, last, K) by requests in the round, as the bundle is to be served:
            the default grid has every K, any other grid must have it.
        platform: "cpu", "cuda" or "tpu"; None: what is attached.
        topology: the TPU slice to build for, such as "v5e:2x2"; it need not be attached.
        tensor_parallel: devices that share every layer; None: all of `topology`, else 1.
        dtype: "float32" or "bfloat16"; None: float32 on a CPU, else bfloat16.
        weights: format of linear layers and vocabulary head, "int8" (a byte per number) or `dtype`; None: "int8" for a
            quantized checkpoint, else `dtype`.
        draft_weights: the same for the draft; None: as `weights`.
        sampling: what to build, of "greedy", "sample", "constrain" and "prompt_logprobs"; by default the first two.
        exact: build exactly this grid and sampling. Otherwise a build adds to the grid and sampling of a bundle of the
            same pair and devices that is already there.
        replace: replace a bundle of another pair, dtype, format or slice. Otherwise it is left alone, with BadInput.
        jobs: executables compiled at a time; None: a default for the platform.
        tau: tokens per round, if known: predicts the least time per token on a TPU.
    """

    grid: Grid | str | None
    num_speculative_tokens: int | None
    num_speculative_tokens_per_batch_size: KRanges | None
    platform: str | None
    topology: str | None
    tensor_parallel: int | None
    dtype: str | None
    weights: str | None
    draft_weights: str | None
    sampling: Sequence[str]
    exact: bool
    replace: bool
    jobs: int | None
    tau: float | None


class BuildKeywords(PlanKeywords, total=False):
    """Keyword arguments of `precompile`: those of `plan_build`, and these.

    Attributes:
        self_test: call every new executable once, in a subprocess, and record what it computes; True by default.
        store: a shared store, a directory or URL: executables are looked up and added there.
        ray_address: a Ray cluster that compiles, "host:port", "auto" or "local"; None: this machine.
        retrace: trace every program, even if the bundle is complete and nothing that its programs are made from has
            changed since it was built.
    """

    self_test: bool
    store: str | None
    ray_address: str | None
    retrace: bool


class RebuildKeywords(TypedDict, total=False):
    """Keyword arguments of `rebuild`, with the meaning that they have in `BuildKeywords`."""

    replace: bool
    jobs: int | None
    tau: float | None
    self_test: bool
    store: str | None
    ray_address: str | None


@dataclass(frozen=True)
class BuildRequest:
    """What is asked for: a pair, its grid, the devices and the number formats. For the fields see `PlanKeywords`."""

    target: str
    draft: str
    grid: Grid | str | None = None
    speculative: SpeculativeConfig = SpeculativeConfig()
    platform: str | None = None
    topology: str | None = None
    tensor_parallel: int | None = None
    dtype: str | None = None
    weights: str | None = None
    draft_weights: str | None = None
    sampling: Sequence[str] = DEFAULT_SAMPLING


@dataclass(frozen=True)
class BuildOptions:
    """How a build works, and what becomes of a bundle that is there. For the fields see `BuildKeywords`."""

    jobs: int | None = None
    self_test: bool = True
    store: str | None = None
    ray_address: str | None = None
    retrace: bool = False
    exact: bool = False
    replace: bool = False
    tau: float | None = None


def read_keywords(
    target: str | Path, draft: str | Path, keywords: Mapping[str, Any]
) -> tuple[BuildRequest, BuildOptions]:
    """What is built, and how. Raises BadInput."""
    given = dict(keywords)
    ranges = given.pop("num_speculative_tokens_per_batch_size", None)
    speculative = SpeculativeConfig(
        num_speculative_tokens=given.pop("num_speculative_tokens", None),
        num_speculative_tokens_per_batch_size=None
        if ranges is None
        else check_k_ranges(ranges, BY_BATCH_SIZE),
    )
    check_largest_k(speculative, BY_BATCH_SIZE)
    names = {one.name for one in fields(BuildOptions)}
    options = BuildOptions(**{name: given.pop(name) for name in names & given.keys()})
    return BuildRequest(str(target), str(draft), speculative=speculative, **given), options


@dataclass(frozen=True)
class ResolvedRequest:
    """What a request asks for, once configs and devices are known.

    Attributes:
        spec: the bundle.
        build_target: the devices to compile for.
        store: the bundle's directory.
        manifest_hash: sha256 of the manifest there before anything was read of it, see `Store.hash_manifest`.
        stored: how the layers of quantized checkpoints are stored.
        programs: the programs of a bundle that is built again; None: they are traced.
        named: the keys of the grid that the user named.
    """

    spec: BundleSpec
    build_target: BuildTarget
    store: Store
    manifest_hash: str | None
    stored: Mapping[CheckpointRole, Quantization] = field(default_factory=dict)
    programs: BundledPrograms | None = None
    named: Collection[str] = ()


@dataclass(frozen=True)
class BuildJob:
    """What is built, from what, and where.

    Attributes:
        deployment: the bundle's spec, with its programs.
        source: the programs.
        build_target: the devices to compile for.
        store: the bundle's directory.
        manifest_hash: sha256 of the manifest there when the job was planned, see `Store.hash_manifest`.
        options: how the build works.
        conversions: by model, what the bundle makes of the weights of quantized checkpoints.
        built: the manifest of the bundle that is there, if it is of the same pair and devices.
    """

    deployment: Deployment
    source: ProgramSource
    build_target: BuildTarget
    store: Store
    manifest_hash: str | None = None
    options: BuildOptions = BuildOptions()
    conversions: Mapping[CheckpointRole, WeightConversion] = field(default_factory=dict)
    built: Manifest | None = None


# -- resolve: the spec that a request asks for


def resolve(request: BuildRequest, store: Store, observer: BuildObserver) -> ResolvedRequest:
    """Reads the pair's configs and chooses the devices; starts JAX. Raises BadInput, BadCheckpoint."""
    manifest_hash = store.hash_manifest()
    sampling = check_sampling_kinds(request.sampling, f"--sampling '{','.join(request.sampling)}'")
    references: dict[CheckpointRole, str] = {"target": request.target, "draft": request.draft}
    configs = {
        role: read_config(locate_checkpoint(reference, role))
        for role, reference in references.items()
    }
    target = read_target(configs["target"])
    draft = read_draft(configs["draft"], target)
    if warning := find_ambiguity(configs["draft"]):
        observer.on_warning(warning)
    positions = {
        str(configs["target"].path): target.decoder.reach,
        str(configs["draft"].path): draft.decoder.reach,
    }
    build_target = choose_build_target(request.platform, request.topology, request.tensor_parallel)
    where = name_slice(build_target)
    kernels = choose_device_kernels(find_chip(build_target), target, draft)
    grid = choose_grid(
        target,
        draft,
        positions,
        request.grid,
        request.speculative,
        reads_own_length=kernels is not None and kernels.attends,
        flat_in_k=kernels is not None and _is_flat_in_k(where, target),
    )
    dtype = request.dtype or ("float32" if where.platform == "cpu" else "bfloat16")
    stored = {
        role: found
        for role, config in configs.items()
        if (found := read_quantization(config)) is not None
    }
    formats = choose_formats(request.weights, request.draft_weights, stored, dtype)
    spec = PlannedBundle(
        target=TargetModel(_make_absolute(request.target), target),
        draft=DraftModel(_make_absolute(request.draft), draft),
        dtype=dtype,
        sampling=sampling,
        grid=grid,
        slice=where,
        # Plain weights are the default of a plain checkpoint only.
        weight_formats=formats if stored or formats != PLAIN else msgspec.UNSET,
    )
    return ResolvedRequest(
        spec, build_target, store, manifest_hash, stored, named=find_named(request.grid)
    )


def _is_flat_in_k(where: Slice, target: Target) -> bool:
    """Whether a round of few rows takes about as long for every K: that of streaming all weights once.

    Not where more tokens read more experts, and not on slices, whose sums take longer for more tokens.
    """
    dense = not isinstance(target.decoder.mlp, MixtureOfExperts)
    return dense and where.devices == 1


def _make_absolute(reference: str) -> str:
    """A directory as an absolute path, so that the bundle finds it from anywhere; a hub id unchanged."""
    if reference == EMBEDDED or not Path(reference).expanduser().is_dir():
        return reference
    return str(Path(reference).expanduser().absolute())


# -- plan: what is built where a bundle may be already


def plan(asked: ResolvedRequest, options: BuildOptions, observer: BuildObserver) -> BuildJob:
    """Combines a request with the bundle that is there, and makes the programs.

    Raises BadInput where that bundle is of another pair, dtype, format or slice, or cannot hold both grids.
    """
    built = _read_built(asked, options, observer)
    spec = asked.spec
    if built and not options.exact:
        spec = _add_to_bundle(asked, built, observer)
    deployment = plan_deployment(spec, find_chip(asked.build_target))
    check_tau(options.tau, spec.grid, deployment.chip)
    source = asked.programs or TracedPrograms(deployment.programs, spec.grid)
    if built and options.exact:
        _report_loss(built, source.signatures, observer)
    check_unquantized(asked.stored, deployment.programs)
    job = BuildJob(
        deployment=deployment,
        source=source,
        build_target=asked.build_target,
        store=asked.store,
        manifest_hash=asked.manifest_hash,
        options=options,
        conversions=plan_conversions(asked.stored, deployment.programs),
        built=built,
    )
    observer.on_plan(deployment)
    for role, conversion in job.conversions.items():
        observer.on_info(f"{role}: {conversion.summary}")
    return job


def _read_built(
    asked: ResolvedRequest, options: BuildOptions, observer: BuildObserver
) -> Manifest | None:
    """The manifest of the bundle that is there; None where there is none that the build can add to."""
    bundle = asked.store.bundle
    try:
        built = read_manifest(bundle)
    except MissingBundle:
        return None
    except NewerBundle as error:
        if not options.replace:
            raise BadInput(f"{error} Or name another directory, or --replace it") from error
        observer.on_info(f"the newer bundle is replaced: {error}")
        return None
    except CorruptBundle as error:
        observer.on_info(f"the grid of the bundle is not kept: {error}")
        return None
    if not (changes := built.differences(asked.spec)):
        return built
    count = len(built.entries)
    if not options.replace:
        raise BadInput(
            f"{bundle} holds a bundle that cannot serve what is asked for, and its {count} executables would be "
            "replaced:",
            *(f"  {one.field}: built for {one.a!r}, asked for {one.b!r}" for one in changes),
            "Build in another directory with --bundle, or replace the bundle with --replace",
        )
    fields = ", ".join(f"{one.field} {one.b!r} instead of {one.a!r}" for one in changes)
    observer.on_info(f"the bundle's {count} executables are replaced: {fields}")
    return None


def _add_to_bundle(asked: ResolvedRequest, built: Manifest, observer: BuildObserver) -> BundleSpec:
    """The requested spec with grid and sampling of the bundle added. Raises BadInput where no grid has both."""
    try:
        both = asked.spec.union(built, asked.named)
    except BadInput as error:
        raise BadInput(
            f"{asked.store.bundle} has the grid '{built.grid}': {error}. Name another bundle, or build only what is "
            "asked for with --exact"
        ) from error
    if both != asked.spec:
        observer.on_info(
            f"what the bundle has is kept: the grid is '{both.grid}', sampling {','.join(both.sampling)}; --exact "
            "drops the rest"
        )
    return both


def _report_loss(built: Manifest, signatures: Sequence[Signature], observer: BuildObserver) -> None:
    """Says which executables leave the bundle where exactly these signatures are built."""
    labels = {signature.label for signature in signatures}
    dropped = [entry.signature for entry in built.entries if entry.signature.label not in labels]
    if not dropped:
        return
    counts = Counter(signature.program for signature in dropped)
    observer.on_info(
        f"{len(dropped)} of {len(built.entries)} executables leave the bundle "
        f"({', '.join(f'{count} {name}' for name, count in counts.items())}); its grid was '{built.grid}', sampling "
        f"{','.join(built.sampling)}. dflash-bundle gc removes their files"
    )


# -- build: executables that are found or compiled


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
        compilation = build(job, observer, shared, inputs)
        entries = publish(job, compilation, observer, inputs)
    if shared:
        for entry in entries:
            shared.add(job.store, entry)
    return msgspec.structs.replace(compilation, entries=entries)


def build(
    job: BuildJob,
    observer: BuildObserver,
    shared: SharedStore | None,
    inputs: BuildInputs | None,
) -> Compilation:
    """Finds or compiles every executable of a job. Raises BuildFailed, BadInput."""
    if inputs is not None and not job.options.retrace:
        found = _find_complete_bundle(job, inputs, observer)
        if found:
            return found
    check_disk_space(job)
    if isinstance(job.source, BundledPrograms) and _rebuilds_in_place(job.source, job.store):
        job.store.restore_records(job.source.manifest)
    options = job.options
    with open_compiler_pool(
        job.build_target, job.store, options.jobs, options.ray_address, observer
    ) as pool:
        observer.on_phase("compile", len(job.source.signatures))
        try:
            return compile_all(job.source, pool, job.store, observer, shared)
        finally:
            observer.on_phase_end("compile")


def _rebuilds_in_place(programs: BundledPrograms, store: Store) -> bool:
    """Whether the programs are those of the bundle in this store."""
    return programs.store.bundle.resolve() == store.bundle.resolve()


def _find_complete_bundle(
    job: BuildJob, inputs: BuildInputs, observer: BuildObserver
) -> Compilation | None:
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
    except CorruptBundle:  # also for a manifest of another version
        return None
    if not _would_publish(job, manifest):
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
    seconds = time.monotonic() - began
    return Compilation(manifest.environment, manifest.entries, frozenset(), seconds)


def _would_publish(job: BuildJob, manifest: Manifest) -> bool:
    """Whether the job would publish this manifest, if its programs are the same."""
    environment = manifest.environment
    entries = manifest.entries
    if isinstance(job.build_target, TargetDevices):
        same_machine = environment == job.build_target.environment
    else:
        same_machine = manifest.slice == job.deployment.spec.slice and _is_of_host(environment)
    options = [choose_options(job.source, entry.signature, environment) for entry in entries]
    return (
        same_machine
        and [entry.signature for entry in entries] == list(job.source.signatures)
        and [entry.compiler_options for entry in entries] == options
        and _make_manifest(job, environment, entries)
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


def list_missing(job: BuildJob) -> list[Signature]:
    """The signatures without a build record; all of them where another compiler or machine built the bundle."""
    signatures = list(job.source.signatures)
    try:
        built = read_manifest(job.store.bundle).environment
    except CorruptBundle:  # a killed build has records and no manifest; MissingBundle is one
        built = None
    if built is not None and not _is_of_host(built):
        return signatures
    stored = job.store.list_stored(signatures)
    return [signature for signature in signatures if signature not in stored]


def check_disk_space(job: BuildJob) -> None:
    """Raises BadInput where the disk has less free space than the missing executables are estimated to take."""
    missing = list_missing(job)
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
        deployment.programs, grid, deployment.devices, chip, deployment.spec.positions, measured
    )
    if doubt:
        observer.on_warning(doubt)


# -- publish: checks of what was built, and the manifest


def publish(
    job: BuildJob,
    compilation: Compilation,
    observer: BuildObserver,
    inputs: BuildInputs | None,
) -> tuple[Entry, ...]:
    """Self-tests what was built and writes the manifest; returns its entries. Raises BuildFailed, BadInput."""
    if conflicts := find_layout_conflicts(compilation.entries):
        lines = (f"  {conflict}" for conflict in conflicts)
        raise BuildFailed("executables do not fit together, nothing is published:", *lines)
    check_memory(job.deployment, observer, read_compiler_figures(compilation.entries))
    manifest = _make_manifest(job, compilation.environment, compilation.entries)
    check_consistent(job.store.bundle, manifest)
    # Results taken over from the old bundle are not reproduced yet, also where an earlier run built the executable.
    untested = {entry.key for entry in manifest.entries if not is_comparable(entry.self_test)}
    untested |= set(compilation.compiled)
    manifest = msgspec.structs.replace(manifest, entries=_add_records(job, manifest.entries))
    entries = manifest.entries
    if job.options.self_test:
        entries = run_self_tests(job.store, manifest, untested, observer)
    job.store.publish(msgspec.structs.replace(manifest, entries=entries))
    if inputs is not None:
        job.store.write_build_inputs(inputs)
    return entries


def _add_records(job: BuildJob, entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Entries with the self-test results of the bundle that is built again, which they must reproduce."""
    old = job.source.manifest.entries if isinstance(job.source, BundledPrograms) else ()
    records = {entry.signature.label: entry.self_test for entry in old}
    return tuple(
        msgspec.structs.replace(
            entry, self_test=entry.self_test or records.get(entry.signature.label)
        )
        for entry in entries
    )


def _make_manifest(job: BuildJob, environment: Environment, entries: Sequence[Entry]) -> Manifest:
    return Manifest.of(
        job.deployment.spec,
        environment=environment,
        state=job.source.state,
        weights=job.source.recipes,
        entries=tuple(bound_entries(job.deployment, entries)),
    )


def bound_entries(deployment: Deployment, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Entries with the least time of each call and of its sums on a TPU; unchanged for devices without figures."""
    for entry in entries:
        if deployment.chip:
            work = deployment.roofline.cost(entry.signature)
            cost = msgspec.structs.replace(
                entry.cost,
                bound_seconds=work.bound_seconds(deployment.chip, deployment.devices),
                exchange_seconds=work.exchange_seconds(deployment.chip, deployment.devices),
            )
            entry = msgspec.structs.replace(entry, cost=cost)
        yield entry
