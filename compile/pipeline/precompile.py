"""Precompile: builds the bundle of a checkpoint pair. The library interface of `dflash-precompile`."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import DraftModel, TargetModel, read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import check_consistent
from dflash_aot.cache.devices import ignore_jax_switches
from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.cache.files.checkpoint_files import CONFIG_FILE
from dflash_aot.cache.files.locations import EMBEDDED, choose_directory, locate_checkpoint
from dflash_aot.cache.grid import Grid, check_positions, default_grid, parse_grid
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.quantization import (
    Quantization,
    WeightConversion,
    plan_conversion,
    read_quantization,
)
from dflash_aot.cache.model_config.speculative_config import (
    BY_BATCH_SIZE,
    FLAG,
    KRanges,
    SpeculativeConfig,
    check_k_ranges,
    check_largest_k,
    choose_k,
    list_range_ks,
)
from dflash_aot.cache.model_config.speculators_draft import find_ambiguity
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.model_config.tensor_names import list_modules, list_unconverted, names_any
from dflash_aot.cache.remote.object_store import open_object_store
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.cache.sampling_state import DEFAULT_SAMPLING, check_sampling_kinds
from dflash_aot.cache.weight_recipe import CheckpointRole
from dflash_aot.compile.pipeline.build_inputs import BuildInputs, read_build_inputs
from dflash_aot.compile.pipeline.build_job import BuildJob, BuildOptions, run_build
from dflash_aot.compile.pipeline.build_report import (
    BuildPlan,
    BuildReport,
    plan_executables,
    report_compilation,
)
from dflash_aot.compile.pipeline.build_target import choose_build_target, name_target
from dflash_aot.compile.pipeline.deployment import (
    add_to_bundle,
    check_tau,
    choose_dtype,
    choose_formats,
    describe_loss,
    plan_deployment,
)
from dflash_aot.compile.pipeline.observer import BuildObserver
from dflash_aot.compile.programs.program_source import BundledPrograms, TracedPrograms
from dflash_aot.compile.programs.programs import Programs


@dataclass(frozen=True)
class BuildRequest:
    """What a bundle is for: a pair, the shapes to compile, the devices and the number formats.

    Attributes:
        target: the target's directory or hub id, or "embedded".
        draft: the draft's directory or hub id, or "embedded".
        grid: the grid, its text or the name of a .toml file; None: a default for the pair.
        num_speculative_tokens: the largest k of the default grid; None: as the draft's config says.
        num_speculative_tokens_per_batch_size: (first, last, K) by requests in the round, all of which the grid must
            have.
        platform: "cpu", "cuda" or "tpu"; None: what is attached.
        topology: the TPU slice to build for.
        tensor_parallel: devices that share every layer; None: all of `topology`, else 1.
        dtype: "float32" or "bfloat16"; None: float32 on a CPU, else bfloat16.
        weights: "int8" or `dtype`, of linear layers and vocabulary head; None: "int8" for a quantized checkpoint, else
            `dtype`.
        draft_weights: the same for the draft; None: as `weights`.
        sampling: what to build, of "greedy", "sample", "constrain" and "prompt_logprobs".
    """

    target: str
    draft: str
    grid: Grid | str | None
    num_speculative_tokens: int | None
    num_speculative_tokens_per_batch_size: KRanges | None
    platform: str | None
    topology: str | None
    tensor_parallel: int | None
    dtype: str | None
    weights: str | None
    draft_weights: str | None
    sampling: tuple[str, ...]


@ignore_jax_switches()
def precompile(
    target: str | Path,
    draft: str | Path,
    bundle: str | Path,
    *,
    grid: Grid | str | None = None,
    num_speculative_tokens: int | None = None,
    num_speculative_tokens_per_batch_size: KRanges | None = None,
    platform: str | None = None,
    topology: str | None = None,
    tensor_parallel: int | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    draft_weights: str | None = None,
    sampling: Sequence[str] = DEFAULT_SAMPLING,
    exact: bool = False,
    jobs: int | None = None,
    self_test: bool = True,
    store: str | None = None,
    ray_address: str | None = None,
    retrace: bool = False,
    tau: float | None = None,
    observer: BuildObserver | None = None,
) -> BuildReport:
    """Builds what is missing of the bundle of a target and its draft, and publishes the bundle.

    Needs only the two config.json. Prints nothing, and reads no environment variables but those that JAX, its compilers
    and the libraries of `store` read. Starts JAX for the platform, in this process.

    Args:
        target: the target's directory, its hub id in the local cache, or "embedded".
        draft: its DFlash draft: a directory, a hub id or "embedded".
        bundle: the directory to build in. Executables that it holds already are not compiled again.
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
        sampling: what to build, of "greedy", "sample", "constrain" and "prompt_logprobs".
        exact: build exactly this grid and sampling. Otherwise a build adds to the grid and sampling of a bundle of the
            same pair and devices that is already there.
        jobs: executables compiled at a time; None: a default for the platform.
        self_test: call every new executable once, in a subprocess, and record what it computes.
        store: a shared store, a directory or URL: executables are looked up and added there.
        ray_address: a Ray cluster that compiles, "host:port", "auto" or "local"; None: this machine.
        retrace: trace every program, even if the bundle is complete and nothing that its programs are made from has
            changed since it was built.
        tau: tokens per round, if known: predicts the least time per token on a TPU.
        observer: receives progress; None: ignored.

    Raises:
        BadInput: arguments that cannot be used. Its subclasses are BadCheckpoint and StoreFailed.
        BuildFailed: executables that could not be built, with all reasons.
    """
    request = BuildRequest(
        target=str(target),
        draft=str(draft),
        grid=grid,
        num_speculative_tokens=num_speculative_tokens,
        num_speculative_tokens_per_batch_size=num_speculative_tokens_per_batch_size,
        platform=platform,
        topology=topology,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        weights=weights,
        draft_weights=draft_weights,
        sampling=tuple(sampling),
    )
    options = BuildOptions(jobs=jobs, self_test=self_test, ray_address=ray_address, retrace=retrace)
    observer = observer or BuildObserver()
    job = prepare_build(request, _choose_bundle(bundle), exact, options, observer)
    check_tau(tau, job.deployment.grid, job.deployment.chip)
    # The nodes of a Ray cluster may have other versions and flags than this machine.
    inputs = read_build_inputs(job.build_target) if ray_address is None else None
    return _build(job, store, tau, observer, inputs)


@ignore_jax_switches()
def plan_build(
    target: str | Path,
    draft: str | Path,
    bundle: str | Path,
    *,
    grid: Grid | str | None = None,
    num_speculative_tokens: int | None = None,
    num_speculative_tokens_per_batch_size: KRanges | None = None,
    platform: str | None = None,
    topology: str | None = None,
    tensor_parallel: int | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    draft_weights: str | None = None,
    sampling: Sequence[str] = DEFAULT_SAMPLING,
    exact: bool = False,
    jobs: int | None = None,
    tau: float | None = None,
    observer: BuildObserver | None = None,
) -> BuildPlan:
    """What `precompile` would build, and estimates of time and memory; compiles and writes nothing.

    Arguments and errors are those of `precompile`.
    """
    request = BuildRequest(
        target=str(target),
        draft=str(draft),
        grid=grid,
        num_speculative_tokens=num_speculative_tokens,
        num_speculative_tokens_per_batch_size=num_speculative_tokens_per_batch_size,
        platform=platform,
        topology=topology,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        weights=weights,
        draft_weights=draft_weights,
        sampling=tuple(sampling),
    )
    observer = observer or BuildObserver()
    job = prepare_build(request, _choose_bundle(bundle), exact, BuildOptions(jobs=jobs), observer)
    check_tau(tau, job.deployment.grid, job.deployment.chip)
    _announce(job, observer)
    return plan_executables(job, tau, observer)


@ignore_jax_switches()
def rebuild(
    bundle: str | Path,
    into: str | Path | None = None,
    *,
    require_signature: str | Path | None = None,
    jobs: int | None = None,
    self_test: bool = True,
    store: str | None = None,
    ray_address: str | None = None,
    tau: float | None = None,
    observer: BuildObserver | None = None,
) -> BuildReport:
    """Compiles a bundle's programs again, with this machine's compiler: the same grid, for the same kind of devices.

    Needs no checkpoint. Each new executable must compute what the old executable computed. Other arguments are those of
    `precompile`.

    Args:
        bundle: the bundle's directory.
        into: the directory to build in; None: `bundle`.
        require_signature: the file of a public key, PEM; only a manifest that its owner signed is read.

    Raises:
        MissingBundle: there is no bundle.
        CorruptBundle: the bundle's manifest or programs cannot be used.
        BadInput, BuildFailed: as `precompile` does.
    """
    directory = choose_directory(str(bundle), f"Fetch it: dflash-bundle fetch {bundle}")
    own_store = Store(_choose_bundle(into) if into is not None else directory)
    manifest_hash = own_store.hash_manifest()
    manifest = read_manifest(
        directory, Path(require_signature) if require_signature is not None else None
    )
    check_consistent(directory, manifest)
    observer = observer or BuildObserver()
    source = BundledPrograms(manifest, Store(directory))
    source.check_readable()
    build_target = choose_build_target(*name_target(manifest.environment))
    facts = manifest.target.facts, manifest.draft.facts
    job = BuildJob(
        target=manifest.target,
        draft=manifest.draft,
        deployment=plan_deployment(
            *facts, manifest.grid, manifest.dtype, manifest.sampling, build_target, manifest.formats
        ),
        source=source,
        build_target=build_target,
        store=own_store,
        options=BuildOptions(jobs=jobs, self_test=self_test, ray_address=ray_address),
        records={
            entry.signature.label: entry.self_test for entry in manifest.entries if entry.self_test
        },
        known=manifest if own_store.bundle.resolve() == directory.resolve() else None,
        names_formats=manifest.weight_formats is not msgspec.UNSET,
        manifest_hash=manifest_hash,
    )
    if into is not None and (
        message := describe_loss(own_store.bundle, job.deployment, build_target)
    ):
        observer.on_info(message)
    return _build(job, store, tau, observer)


def prepare_build(
    request: BuildRequest, bundle: Path, exact: bool, options: BuildOptions, observer: BuildObserver
) -> BuildJob:
    """Reads the pair's configs and chooses the devices; starts JAX. Raises BadInput, BadCheckpoint."""
    manifest_hash = Store(bundle).hash_manifest()  # before anything is read of it
    kinds = check_sampling_kinds(request.sampling, f"--sampling '{','.join(request.sampling)}'")
    facts = read_pair(request.target, request.draft)
    if warning := find_ambiguity(read_config(locate_checkpoint(request.draft, "draft"))):
        observer.on_warning(warning)
    grid = choose_grid(request, *facts)
    build_target = choose_build_target(request.platform, request.topology, request.tensor_parallel)
    dtype = request.dtype or choose_dtype(build_target)
    stored = read_stored_formats(request.target, request.draft)
    formats = choose_formats(request.weights, request.draft_weights, stored, dtype)
    deployment = plan_deployment(*facts, grid, dtype, kinds, build_target, formats)
    if exact:
        message = describe_loss(bundle, deployment, build_target)
    else:
        change = add_to_bundle(bundle, deployment, build_target)
        message = change.message
        if change.sampling != kinds:
            deployment = plan_deployment(
                *facts, change.grid, dtype, change.sampling, build_target, formats
            )
        deployment = msgspec.structs.replace(deployment, grid=change.grid)
    if message:
        observer.on_info(message)
    _check_unquantized(stored, deployment.programs)
    target_facts, draft_facts = facts
    return BuildJob(
        target=TargetModel(_make_absolute(request.target), target_facts),
        draft=DraftModel(_make_absolute(request.draft), draft_facts),
        deployment=deployment,
        source=TracedPrograms(
            deployment.programs, deployment.grid, deployment.platform, deployment.devices
        ),
        build_target=build_target,
        store=Store(bundle),
        options=options,
        conversions=_plan_conversions(stored, deployment.programs),
        names_formats=bool(stored),
        manifest_hash=manifest_hash,
    )


def _read_speculative_config(request: BuildRequest) -> SpeculativeConfig:
    """The values of K that a request names. Raises BadInput."""
    by_batch_size = request.num_speculative_tokens_per_batch_size
    if by_batch_size is not None:
        by_batch_size = check_k_ranges(by_batch_size, BY_BATCH_SIZE)
    speculative = SpeculativeConfig(
        num_speculative_tokens=request.num_speculative_tokens,
        num_speculative_tokens_per_batch_size=by_batch_size,
    )
    check_largest_k(speculative, BY_BATCH_SIZE)
    return speculative


def _build(
    job: BuildJob,
    store: str | None,
    tau: float | None,
    observer: BuildObserver,
    inputs: BuildInputs | None = None,
) -> BuildReport:
    _announce(job, observer)
    with _open_shared_store(store, observer) as shared:
        compilation = run_build(job, observer, shared, inputs)
    store_report = shared.report() if shared else None
    return report_compilation(
        job.deployment, job.store.bundle, compilation, tau, store_report, job.conversions
    )


def _announce(job: BuildJob, observer: BuildObserver) -> None:
    observer.on_plan(job.deployment)
    for role, conversion in job.conversions.items():
        observer.on_info(f"{role}: {conversion.summary}")


def _open_shared_store(
    store: str | None, observer: BuildObserver
) -> AbstractContextManager[SharedStore | None]:
    """Raises StoreFailed before anything is compiled."""
    if store is None:
        return nullcontext()
    shared = SharedStore(open_object_store(store))
    if not shared.report().writable:
        observer.on_warning(
            f"{shared.report().url} is read-only: executables that are built here are not shared"
        )
    return shared


def read_pair(target: str, draft: str) -> tuple[Target, Draft]:
    """The facts of both checkpoints, from their config.json. Raises BadCheckpoint."""
    facts = read_target(read_config(locate_checkpoint(target, "target")))
    return facts, read_draft(read_config(locate_checkpoint(draft, "draft")), facts)


def read_stored_formats(target: str, draft: str) -> dict[CheckpointRole, Quantization]:
    """How the quantized layers of both checkpoints are stored, from their config.json. Raises BadCheckpoint."""
    found: dict[CheckpointRole, Quantization | None] = {
        "target": read_quantization(read_config(locate_checkpoint(target, "target"))),
        "draft": read_quantization(read_config(locate_checkpoint(draft, "draft"))),
    }
    return {role: quantization for role, quantization in found.items() if quantization is not None}


def _check_unquantized(stored: Mapping[CheckpointRole, Quantization], programs: Programs) -> None:
    """Raises BadCheckpoint for a list of unquantized modules that names none of its model."""
    for role, quantization in stored.items():
        modules = list_modules(recipe for recipe in programs.recipes() if recipe.checkpoint == role)
        if not names_any(quantization.unquantized, modules, role):
            raise BadCheckpoint(
                f"{quantization.unquantized.key} names no module of the {role}: expected names of layers that are not "
                "quantized"
            )


def _plan_conversions(
    stored: Mapping[CheckpointRole, Quantization], programs: Programs
) -> dict[CheckpointRole, WeightConversion]:
    """What the bundle makes of the weights of quantized checkpoints."""
    formats: dict[CheckpointRole, str] = {
        "target": programs.formats.target,
        "draft": programs.formats.draft,
    }
    dtype = programs.pair.dtype
    return {
        role: plan_conversion(
            quantization,
            dtype if formats[role] == "plain" else formats[role],
            dtype,
            list_unconverted(programs.recipes(), role),
        )
        for role, quantization in stored.items()
    }


def choose_grid(request: BuildRequest, target: Target, draft: Draft) -> Grid:
    """The requested grid, or a default one, with every K that is named. Raises BadInput."""
    speculative = _read_speculative_config(request)
    positions = {
        str(locate_checkpoint(request.target, "target") / CONFIG_FILE): target.decoder.reach,
        str(locate_checkpoint(request.draft, "draft") / CONFIG_FILE): draft.decoder.reach,
    }
    k = choose_k(speculative, draft)
    by_batch_size = list_range_ks(speculative.num_speculative_tokens_per_batch_size)
    if request.grid is None:
        return default_grid(draft.block, min(positions.values()), k, by_batch_size)
    # A Grid is checked as its text is.
    chosen = parse_grid(str(request.grid), draft.block)
    check_positions(chosen, positions)
    if speculative.num_speculative_tokens not in (None, chosen.k[-1]):
        raise BadInput(
            f"num_speculative_tokens ({FLAG}) is {k}, but the largest k of grid (--buckets) is {chosen.k[-1]}"
        )
    if missing := [str(one) for one in by_batch_size if one not in chosen.k]:
        raise BadInput(
            f"{BY_BATCH_SIZE} ({FLAG}) has K = {', '.join(missing)}, which grid (--buckets) lacks: it has "
            f"k={','.join(map(str, chosen.k))}"
        )
    return chosen


def _choose_bundle(bundle: str | Path) -> Path:
    """The directory to build in. Raises BadInput for a URL."""
    return choose_directory(
        str(bundle), f"Build in a directory, then push it: dflash-bundle push DIR {bundle}"
    )


def _make_absolute(reference: str) -> str:
    """A directory as an absolute path, so that the bundle finds it from anywhere; a hub id unchanged."""
    if reference == EMBEDDED or not Path(reference).expanduser().is_dir():
        return reference
    return str(Path(reference).expanduser().absolute())
