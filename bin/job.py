"""A build from its beginning to a published bundle."""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from tqdm import tqdm

from dflash_aot.bin.bucket_table import Deployment
from dflash_aot.bin.canary_recording import prove_executables
from dflash_aot.bin.command_line import format_bytes
from dflash_aot.bin.place import Place, check_cluster, describe_place, find_chip, open_site
from dflash_aot.cache.bundle.manifest import SCHEMA, DraftModel, Manifest, SelfTest, TargetModel
from dflash_aot.cache.bundle.manifest_checks import check_consistent
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.compile.analysis.build_estimate import estimate_build
from dflash_aot.compile.analysis.executable_checks import find_layout_conflicts
from dflash_aot.compile.analysis.memory_plan import CompilerFigures, check_fits, read_compiler_figures
from dflash_aot.compile.pipeline.compilation_manager import Progress, Report, Site, build
from dflash_aot.compile.programs.program_source import ProgramSource
from dflash_aot.compile.programs.programs import Programs


@dataclass(frozen=True)
class Job:
    """What is built, from what, where, and into which store.

    `canaries` by label: what executables of the same programs computed before, to which the new ones are held. `known`:
    a manifest whose executables the store holds, with records or without. `cluster`: the address of a Ray cluster that
    compiles, None: this machine does.
    """

    target: TargetModel
    draft: DraftModel
    deployment: Deployment
    source: ProgramSource
    place: Place
    store: Store
    jobs: int | None = None
    call_canaries: bool = True
    canaries: Mapping[str, SelfTest] = field(default_factory=dict)
    known: Manifest | None = None
    cluster: str | None = None


def describe_deployment(
    target: Target, draft: Draft, grid: Grid, dtype: str | None, sampling: tuple[SamplingMode, ...], place: Place
) -> Deployment:
    """A pair at a place; `dtype` None: what suits it. Raises BadInput where devices cannot share the pair."""
    platform, devices = describe_place(place)
    dtype = dtype or ("float32" if platform == "cpu" else "bfloat16")
    programs = Programs(target, draft, dtype, stacked=platform == "tpu", devices=devices, sampling=sampling)
    return Deployment(target, draft, programs, grid, dtype, platform, devices, find_chip(place))


def run_job(job: Job, shared: SharedStore | None = None) -> Report:
    """Builds what is missing, tries it, publishes the bundle, shares it. Raises BuildFailed, BadInput."""
    if job.cluster is not None:
        check_cluster(job.place)
    check_memory(job.deployment)
    with job.store.open_for_building():
        check_space(job)
        if job.known:
            job.store.restore_records(job.known)
        with open_site(job.place, job.store, job.jobs, job.cluster) as site:
            report = _build_with_progress(job.source, site, job.store, shared)
        if conflicts := find_layout_conflicts(report.entries):
            raise BuildFailed("executables do not fit together, nothing is published:\n  " + "\n  ".join(conflicts))
        check_memory(job.deployment, read_compiler_figures(report.entries))
        manifest = _describe_bundle(job, site, report)
        check_consistent(job.store.bundle, manifest)
        entries = prove_executables(job.store, manifest, report.compiled, job.canaries, job.call_canaries)
        job.store.publish(msgspec.structs.replace(manifest, entries=entries))
    if shared:
        for entry in entries:
            shared.add(job.store, entry)
    return msgspec.structs.replace(report, entries=entries)


def check_space(job: Job) -> None:
    """What is missing finds room on the disk, as far as is known what it takes. Raises BadInput."""
    signatures, pair = job.source.signatures, job.deployment.programs.pair
    effort = estimate_build(signatures, pair, job.deployment.platform)
    missing = effort.bytes - job.store.stored_bytes(signatures) if effort else 0
    free = shutil.disk_usage(job.store.bundle).free
    if missing > free:
        raise BadInput(
            f"{job.store.bundle}: {len(signatures)} executables take about {format_bytes(missing)} more on disk, and "
            f"{format_bytes(free)} are free there. Make room, name another place with --bundle, or a smaller grid"
        )


def check_memory(deployment: Deployment, measured: CompilerFigures | None = None) -> None:
    """Before and after a build: see `check_fits`."""
    grid, chip = deployment.grid, deployment.chip
    if chip is None:
        return
    doubt = check_fits(deployment.programs, grid, deployment.devices, chip, deployment.positions, measured)
    if doubt:
        print(f"WARNING: {doubt}", file=sys.stderr)


def _build_with_progress(source: ProgramSource, site: Site, store: Store, shared: SharedStore | None) -> Report:
    """A bar with count, elapsed and remaining time and the bucket that was begun last."""
    with tqdm(total=len(source.signatures), unit="exe", file=sys.stderr, dynamic_ncols=True) as bar:

        def observe(progress: Progress) -> None:
            if progress.entry is None:
                bar.set_postfix_str(progress.label)
            bar.update(progress.done - bar.n)

        return build(source, site, store, observe, shared)


def _describe_bundle(job: Job, site: Site, report: Report) -> Manifest:
    deployment, programs = job.deployment, job.deployment.programs
    return Manifest(
        schema=SCHEMA,
        environment=site.environment,
        target=job.target,
        draft=job.draft,
        dtype=deployment.dtype,
        sampling=programs.pair.sampling,
        grid=deployment.grid,
        state=job.source.state,
        weights=job.source.recipes,
        entries=report.entries,
    )
