"""Build plan and build report: what a build will make, and what it made."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from dflash_aot.cache.bundle.manifest import Entry, read_manifest
from dflash_aot.cache.errors import CorruptBundle, MissingBundle
from dflash_aot.cache.model_config.quantization import WeightConversion
from dflash_aot.cache.remote.shared_store import StoreReport
from dflash_aot.cache.signature import ExecutableId, state_arrays
from dflash_aot.cache.weight_recipe import CheckpointRole
from dflash_aot.compile.analysis.executable_checks import find_pool_copies, find_problems
from dflash_aot.compile.analysis.memory_plan import (
    CompilerFigures,
    read_compiler_figures,
    read_estimates,
)
from dflash_aot.compile.pipeline.build_job import BuildJob, list_missing
from dflash_aot.compile.pipeline.compilation_manager import Compilation, choose_jobs
from dflash_aot.compile.pipeline.deployment import (
    BuildEstimate,
    Deployment,
    MemoryEstimate,
    estimate_build,
    estimate_memory,
)
from dflash_aot.compile.pipeline.observer import BuildObserver


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


def plan_executables(job: BuildJob, tau: float | None, observer: BuildObserver) -> BuildPlan:
    """The plan of a job. `tau`: tokens per round, if known.

    Estimated times are those of a bundle of the same pair and devices, if there is one where the job builds.
    """
    deployment = job.deployment
    programs = deployment.programs
    grid = deployment.grid
    signatures = programs.list_signatures(grid)
    missing = list_missing(job, signatures)
    return BuildPlan(
        bundle=job.store.bundle,
        deployment=deployment,
        executables=dict(Counter(signature.program for signature in signatures)),
        present=len(signatures) - len(missing),
        weight_bytes=sum(recipe.bytes for recipe in programs.recipes()),
        state_bytes=sum(array.bytes for array in state_arrays(programs.pair, grid)),
        jobs=choose_jobs(job.build_target, job.options.jobs),
        estimate=estimate_build(missing, programs.pair, deployment.platform),
        padding_waste={
            axis: find_padding_waste(getattr(grid, axis)) for axis in ("batch", "length", "prefill")
        },
        memory=estimate_memory(
            deployment, tau, CompilerFigures(seconds=_read_bundle_estimates(job, observer))
        ),
        conversions=job.conversions,
    )


def _read_bundle_estimates(job: BuildJob, observer: BuildObserver) -> dict[ExecutableId, float]:
    """Estimates of the executables in the bundle where the job builds; empty for another pair or other devices."""
    deployment = job.deployment
    try:
        manifest = read_manifest(job.store.bundle)
    except MissingBundle:
        return {}
    except CorruptBundle as error:
        observer.on_warning(f"estimated times of the bundle are not used: {error}")
        return {}
    built = manifest.environment
    same = (manifest.target.facts, manifest.draft.facts, manifest.dtype, manifest.formats) == (
        deployment.target,
        deployment.draft,
        deployment.dtype,
        deployment.programs.formats,
    )
    where = deployment.chip and (deployment.chip.device_kind, deployment.devices)
    return (
        read_estimates(manifest.entries)
        if same and where == (built.device_kind, built.device_count)
        else {}
    )


def report_compilation(
    deployment: Deployment,
    bundle: Path,
    compilation: Compilation,
    tau: float | None = None,
    store: StoreReport | None = None,
    conversions: Mapping[CheckpointRole, WeightConversion] = MappingProxyType({}),
) -> BuildReport:
    """The report of a finished build. `tau`: tokens per round, if known."""
    return BuildReport(
        bundle=bundle,
        deployment=deployment,
        entries=compilation.entries,
        compiled=compilation.compiled,
        seconds=compilation.seconds,
        findings=tuple(_list_findings(deployment, compilation.entries)),
        memory=estimate_memory(deployment, tau, read_compiler_figures(compilation.entries)),
        store=store,
        conversions=conversions,
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
