"""Emulated build: a CPU bundle that computes what the executables of a TPU bundle compute.

Every executable is compiled again for the described TPU. Its bytes must be those of the bundle, so that the compiler's
optimized program is the bundle's own. That program, made portable (`compile.emulation`), is compiled for this machine's
CPU. The result is a bundle as any other: engines open it, commands serve and verify it.
"""

import os
from pathlib import Path

import jax

from dflash_aot.cache.bundle.manifest import (
    Manifest,
    list_remedies,
    read_manifest,
    rebuild_command,
)
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle_spec import BundleSpec, PlannedBundle, Slice
from dflash_aot.cache.chips import TOPOLOGIES, Topology
from dflash_aot.cache.devices import ignore_jax_switches
from dflash_aot.cache.environment import VIRTUAL_DEVICES_FLAG, find_differences
from dflash_aot.cache.errors import (
    BadInput,
    BuildFailed,
    CorruptBundle,
    IncompatibleBundle,
    MissingBundle,
)
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.models.backend import STACKED_CPU
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.pipeline.build_job import BuildJob, BuildOptions, run_build
from dflash_aot.compile.pipeline.build_target import attach_devices
from dflash_aot.compile.pipeline.compilation_manager import BuildObserver
from dflash_aot.compile.pipeline.deployment import Deployment
from dflash_aot.compile.pipeline.executable_builder import CompileJob
from dflash_aot.compile.pipeline.worker_pool import WorkerPool
from dflash_aot.compile.programs.programs import (
    BundledPrograms,
    Programs,
    ProgramSource,
    TracedPrograms,
)


class EmulatedPrograms:
    """The programs of a TPU bundle as the TPU compiler optimized them, for CPUs; a `ProgramSource`."""

    reorders_sums = False

    def __init__(self, manifest: Manifest, store: Store, pool: WorkerPool):
        self._programs = BundledPrograms(manifest, store)
        self._pool = pool
        self._bundle = store.bundle
        self._entries = {entry.signature.label: entry for entry in manifest.entries}
        self.signatures = self._programs.signatures
        self.known = self._programs.known
        self.state = self._programs.state
        self.recipes = self._programs.recipes

    def export(self, signature: Signature) -> bytes:
        """Compiles the program for the TPU and translates the compiler's output.

        Raises BuildFailed if the output has something that cannot be emulated, or the compiler makes another executable
        than the bundle's; CorruptBundle as `BundledPrograms.export`.
        """
        promised = self._entries[signature.label]
        named = {name: self.known[name] for name in (*signature.weights, *signature.state)}
        program, options = self._programs.export(signature), promised.compiler_options
        job = CompileJob(signature, named, program, promised.key, options, emulate=True)
        entry, emulated = self._pool.compile(job)
        if entry.sha256 != promised.sha256:
            raise BuildFailed(
                f"compiled here it has sha256 {entry.sha256}, the bundle's has {promised.sha256}: another executable "
                f"would be emulated than the bundle's. Rebuild the bundle here: {rebuild_command(self._bundle)}"
            )
        return emulated


def find_topology(bundle: Path, manifest: Manifest) -> Topology:
    """The slice that a bundle was built for. Raises BadInput if it was built for another device than a TPU."""
    if (topology := TOPOLOGIES.get(manifest.environment.topology)) is None:
        kind = manifest.environment.device_kind
        raise BadInput(f"{bundle} was built for {kind}: only executables for TPUs can be emulated")
    return topology


def emulate_bundle(
    bundle: Path, manifest: Manifest, into: Path, observer: BuildObserver | None = None
) -> None:
    """Builds the emulated bundle of a TPU bundle in the directory `into`. Starts JAX for CPUs.

    What `into` holds already is not compiled for the CPU again.

    Raises BadInput if the bundle is not for TPUs or `into` holds another bundle, IncompatibleBundle if another
    compiler made it, and what `precompile` raises.
    """
    environment = manifest.environment
    topology = find_topology(bundle, manifest)
    check_destination(into, manifest)
    with WorkerPool(topology, into, jobs=1, emulates=True) as pool:
        if found := find_differences(environment, pool.environment):
            raise IncompatibleBundle(
                f"{bundle} was built with other versions or settings than those here:",
                *(f"  {one.field}: built with {one.built!r}, here {one.here!r}" for one in found),
                *list_remedies(bundle, environment, found, manifest.build_command(bundle)),
            )
        source = EmulatedPrograms(manifest, Store(bundle), pool)
        _build(manifest, source, into, observer)


def check_destination(into: Path, manifest: Manifest) -> None:
    """Raises BadInput if `into` holds a bundle that no emulation of this one made: it would be replaced.

    Only emulated bundles are for CPUs and take the weights of a TPU.
    """
    try:
        found = read_manifest(into)
    except MissingBundle:
        return
    except CorruptBundle as error:
        raise BadInput(
            f"{into} holds a bundle that cannot be read, and would be replaced: name another directory. {error}"
        ) from error
    if found.differences(_move_to_cpu(manifest)) or found.weights != manifest.weights:
        raise BadInput(
            f"{into} holds a bundle for {found.environment.device_kind} that is no emulation of this one, and would be "
            "replaced: name another directory"
        )


@ignore_jax_switches()
def build_plain_bundle(
    manifest: Manifest, into: Path, observer: BuildObserver | None = None
) -> None:
    """Builds the programs of a manifest's pair for this machine's CPU, with the signatures of the TPU's.

    Raises as `precompile`.
    """
    _build(manifest, None, into, observer)


def _move_to_cpu(spec: BundleSpec) -> BundleSpec:
    return PlannedBundle(**spec.fields(), slice=Slice("cpu", "", spec.slice.devices))


def _build(
    manifest: Manifest,
    source: ProgramSource | None,
    into: Path,
    observer: BuildObserver | None,
) -> None:
    """Builds for the CPU, with the weights that a TPU takes: stacked. `source` None: programs are traced."""
    spec = _move_to_cpu(manifest)
    devices = spec.slice.devices
    facts = spec.target.facts, spec.draft.facts
    programs = Programs(
        *facts, spec.dtype, TensorParallel(devices, STACKED_CPU), spec.sampling, spec.formats
    )
    job = BuildJob(
        deployment=Deployment(spec, programs, chip=None),
        source=source or TracedPrograms(programs, spec.grid),
        build_target=attach_devices("cpu", None, devices),
        store=Store(into),
        manifest_hash=Store(into).hash_manifest(),
        options=BuildOptions(self_test=False),
    )
    run_build(job, observer or BuildObserver())


def provide_cpu_devices(count: int) -> None:
    """Makes JAX start with `count` CPU devices, unless XLA_FLAGS says how many. Call it before JAX starts."""
    if count > 1 and VIRTUAL_DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)
