"""dflash-precompile --rebuild: a bundle's programs compiled anew, from what the bundle itself holds."""

from pathlib import Path

from dflash_aot.bin.job import Job, describe_deployment
from dflash_aot.bin.place import recall_place
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.manifest_checks import check_consistent
from dflash_aot.cache.bundle.store import Store
from dflash_aot.compile.programs.program_source import BundledPrograms


def plan_rebuild(bundle: Path, signed_by: Path | None, store: Store, jobs: int | None, call_canaries: bool) -> Job:
    """The same grid for the same kind of devices, by the compiler that is here, into `store`; starts JAX.

    Checkpoints are neither needed nor looked at. `signed_by`: as `read_manifest` takes it. Raises MissingBundle,
    CorruptBundle, BadInput.
    """
    manifest = read_manifest(bundle, signed_by)
    check_consistent(bundle, manifest)
    place = recall_place(manifest.environment)
    facts = manifest.target.facts, manifest.draft.facts
    return Job(
        target=manifest.target,
        draft=manifest.draft,
        deployment=describe_deployment(*facts, manifest.grid, manifest.dtype, manifest.sampling, place),
        source=BundledPrograms(manifest, Store(bundle)),
        place=place,
        store=store,
        jobs=jobs,
        call_canaries=call_canaries,
        canaries={entry.signature.label: entry.self_test for entry in manifest.entries if entry.self_test},
        known=manifest if store.bundle.resolve() == bundle.resolve() else None,
    )
