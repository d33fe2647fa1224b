"""dflash-precompile: builds the bundle of a target and its draft, before deploy. Only the two config.json are needed.

dflash-precompile [--target DIR|HUB_ID --draft DIR|HUB_ID] [--bundle DIR]
    [--buckets "batch=1,4 length=256,1024 k=0,7,15 prefill=64,256"] [--plan] [--tau T] [--json]
    [--platform cpu|cuda|tpu] [--topology v5e:2x2] [--tensor_parallel N] [--dtype float32|bfloat16] [--jobs N]
    [--sampling greedy,sample] [--canaries] [--check_reproducible] [--store URL]
    [--executor local|ray] [--ray_address HOST:PORT]
    [--speculative_config '{"method": "dflash", "model": DRAFT, "num_speculative_tokens": K}']
dflash-precompile --rebuild BUNDLE [--require_signature PUBLIC.pem] [--bundle DIR] [--jobs N] [--canaries] [--store URL]
    [--executor local|ray] [--ray_address HOST:PORT] [--tau T] [--json]
"""

import dataclasses
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from absl import flags

from dflash_aot.bin.bucket_table import check_tau
from dflash_aot.bin.build_report import report_build
from dflash_aot.bin.command_line import choose_directory, choose_pair, default_bundle, run_command
from dflash_aot.bin.job import Job, describe_deployment, run_job
from dflash_aot.bin.place import ATTACHED_JOBS, choose_jobs, choose_place
from dflash_aot.bin.plan import report_plan
from dflash_aot.bin.rebuild import plan_rebuild
from dflash_aot.bin.reproducibility import check_reproducible
from dflash_aot.cache.bundle.manifest import DraftModel, TargetModel
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import EXAMPLE_BUCKETS, Grid, check_positions, default_grid, parse_grid
from dflash_aot.cache.locations import EMBEDDED, locate_checkpoint
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.speculative_config import SpeculativeConfig, choose_k, parse_speculative_config
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.remote.object_store import open_object_store
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.cache.sampling_state import SAMPLING_MODES, check_sampling_modes
from dflash_aot.cache.topology import Topology
from dflash_aot.compile.pipeline.ray_cluster import OWN
from dflash_aot.compile.programs.program_source import TracedPrograms

WITH_REBUILD = frozenset(
    {
        *("rebuild", "require_signature", "bundle", "jobs", "canaries", "store", "tau", "json"),
        *("executor", "ray_address"),
    }
)
NOT_WITH_PLAN = ("store", "check_reproducible", "canaries", "executor", "ray_address")
FLAGS = flags.FlagValues()
_TARGET = flags.DEFINE_string(
    "target", None, "the target: a directory, or a hub id in the local cache", flag_values=FLAGS
)
_DRAFT = flags.DEFINE_string("draft", None, "its DFlash draft, likewise; neither: the embedded pair", flag_values=FLAGS)
_BUNDLE = flags.DEFINE_string("bundle", None, "where to build; default: the user's cache directory", flag_values=FLAGS)
_BUCKETS = flags.DEFINE_string(
    "buckets", None, f"the grid, such as '{EXAMPLE_BUCKETS}', or a .toml with these keys", flag_values=FLAGS
)
_PLATFORM = flags.DEFINE_enum("platform", None, ["cpu", "cuda", "tpu"], "default: what is attached", flag_values=FLAGS)
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "the TPU slice to build for, such as v5e:2x2; it need not be here", flag_values=FLAGS
)
_TENSOR_PARALLEL = flags.DEFINE_integer(
    "tensor_parallel",
    None,
    "devices that share every layer; default: all of --topology, else 1",
    lower_bound=1,
    flag_values=FLAGS,
)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "default: float32 on cpu, else bfloat16", flag_values=FLAGS
)
_SAMPLING = flags.DEFINE_string(
    "sampling",
    ",".join(SAMPLING_MODES),
    "kinds of verification to build: greedy, sample or both; a request that asks for another one is refused",
    flag_values=FLAGS,
)
_SPECULATIVE = flags.DEFINE_string(
    "speculative_config", None, "the draft and K as vLLM's JSON says them", flag_values=FLAGS
)
_JOBS = flags.DEFINE_integer(
    "jobs",
    None,
    f"executables compiled at a time; default: {ATTACHED_JOBS}, for a TPU that is not here one per core, on Ray "
    "one per CPU of the cluster",
    lower_bound=1,
    flag_values=FLAGS,
)
_EXECUTOR = flags.DEFINE_enum(
    "executor",
    "local",
    ["local", "ray"],
    "who compiles: this machine, or the tasks of a Ray cluster",
    flag_values=FLAGS,
)
_RAY_ADDRESS = flags.DEFINE_string(
    "ray_address", None, "default: RAY_ADDRESS, else a Ray of its own on this machine", flag_values=FLAGS
)
_CANARIES = flags.DEFINE_bool(
    "canaries",
    True,
    "call every new executable once, and keep what it computes: what dflash-bundle verify --deep compares with",
    flag_values=FLAGS,
)
_STORE = flags.DEFINE_string(
    "store",
    None,
    "executables that a team shares, a directory or a URL such as s3://bucket/place: looked for there, and put there",
    flag_values=FLAGS,
)
_REBUILD = flags.DEFINE_string(
    "rebuild",
    None,
    "a bundle to compile anew, by the compiler that is here, from the programs in it: no checkpoint is needed",
    flag_values=FLAGS,
)
_REQUIRE_SIGNATURE = flags.DEFINE_string(
    "require_signature", None, "with --rebuild, a public key, PEM: of what its owner signed only", flag_values=FLAGS
)
_CHECK_REPRODUCIBLE = flags.DEFINE_bool(
    "check_reproducible", False, "build twice and compare, byte by byte where that is promised (TPU)", flag_values=FLAGS
)
_PLAN = flags.DEFINE_bool("plan", False, "compile nothing, say what would be built", flag_values=FLAGS)
_TAU = flags.DEFINE_float(
    "tau", None, "tokens per round, if known: predicts the time per token at best (TPU)", flag_values=FLAGS
)
_JSON = flags.DEFINE_bool("json", False, "the report as JSON on standard output", flag_values=FLAGS)


def main() -> None:
    """The console script."""
    sys.exit(run_command("dflash-precompile", __doc__, FLAGS, precompile))


def precompile() -> None:
    """Builds what is missing, publishes the bundle, reports; or says what would be built."""
    if _REBUILD.value is not None:
        if not _REBUILD.value:
            raise BadInput("--rebuild '': name the bundle")
        _rebuild(choose_directory(_REBUILD.value, f"Fetch it: dflash-bundle fetch {_REBUILD.value}"))
        return
    if _REQUIRE_SIGNATURE.value is not None:
        raise BadInput("--require_signature without --rebuild: there is no bundle that could be signed yet")
    job = _plan_job()
    check_tau(_TAU.value, job.deployment.grid, job.deployment.chip)
    _say(f"draft of {job.draft.facts.dialect}'s format: {describe_draft(job.draft.facts)}")
    if _PLAN.value:
        _check_plan_flags()
        report_plan(job.deployment, job.store.bundle, choose_jobs(job.place, _JOBS.value), _TAU.value, _JSON.value)
    else:
        _run(job)


def _check_plan_flags() -> None:
    """Raises BadInput for what would be passed over in silence."""
    if asked := sorted(f"--{name}" for name in NOT_WITH_PLAN if FLAGS[name].present):
        raise BadInput(f"--plan compiles nothing and asks no store: {', '.join(asked)} cannot be given with it")


def _plan_job() -> Job:
    """What the flags ask for. Raises BadInput, BadCheckpoint."""
    sampling = check_sampling_modes(
        _SAMPLING.value.split(",") if _SAMPLING.value else [], f"--sampling '{_SAMPLING.value}'"
    )
    speculative = parse_speculative_config(_SPECULATIVE.value or "{}")
    references = choose_pair(_TARGET.value, _choose_draft(speculative))
    target, draft = read_pair(*references)
    grid = choose_grid(target, draft, speculative)
    place = choose_place(_PLATFORM.value, _TOPOLOGY.value, _TENSOR_PARALLEL.value)
    deployment = describe_deployment(target, draft, grid, _DTYPE.value, sampling, place)
    bundle = (
        _choose_bundle(_BUNDLE.value)
        if _BUNDLE.value
        else default_bundle(*references, place.name if isinstance(place, Topology) else None)
    )
    return Job(
        target=TargetModel(_as_given(references[0]), target),
        draft=DraftModel(_as_given(references[1]), draft),
        deployment=deployment,
        source=TracedPrograms(deployment.programs, grid, deployment.platform, deployment.devices),
        place=place,
        store=Store(bundle),
        jobs=_JOBS.value,
        call_canaries=_CANARIES.value,
    )


def _rebuild(bundle: Path) -> None:
    """Raises BadInput for flags that ask for something else than what the bundle was built as."""
    if others := sorted(name for name in FLAGS if FLAGS[name].present and name not in WITH_REBUILD):
        raise BadInput(
            f"--rebuild compiles {bundle} as it was built: --{', --'.join(others)} cannot be given with it. It takes "
            f"--{', --'.join(sorted(WITH_REBUILD - {'rebuild'}))}"
        )
    store = Store(_choose_bundle(_BUNDLE.value) if _BUNDLE.value else bundle)
    signed_by = Path(_REQUIRE_SIGNATURE.value) if _REQUIRE_SIGNATURE.value is not None else None
    _run(plan_rebuild(bundle, signed_by, store, _JOBS.value, _CANARIES.value))


def _run(job: Job) -> None:
    bundle = job.store.bundle
    job = dataclasses.replace(job, cluster=_choose_cluster())
    with _open_shared_store() as shared:
        report = run_job(job, shared)
    jobs = choose_jobs(job.place, job.jobs)
    comparison = check_reproducible(bundle, jobs + 1) if _CHECK_REPRODUCIBLE.value else None
    store = shared.report() if shared else None
    report_build(job.deployment, report, bundle, _TAU.value, _JSON.value, comparison, store)


def _choose_cluster() -> str | None:
    """The address of who compiles; None: this machine. Raises BadInput."""
    if _EXECUTOR.value == "ray":
        return _RAY_ADDRESS.value or os.environ.get("RAY_ADDRESS") or OWN
    if _RAY_ADDRESS.value is not None:
        raise BadInput(f"--ray_address {_RAY_ADDRESS.value} without --executor ray: no cluster is asked")
    return None


def _open_shared_store() -> AbstractContextManager[SharedStore | None]:
    """Raises StoreFailed before anything is compiled."""
    if _STORE.value is None:
        return nullcontext()
    shared = SharedStore(open_object_store(_STORE.value))
    if not shared.report().writable:
        _say(f"WARNING: {shared.report().url} is read only: what is built here stays here")
    return shared


def _choose_bundle(place: str) -> Path:
    return choose_directory(place, f"Build in one, then push it: dflash-bundle push DIR {place}")


def read_pair(target: str, draft: str) -> tuple[Target, Draft]:
    facts = read_target(read_config(locate_checkpoint(target, "target")))
    return facts, read_draft(read_config(locate_checkpoint(draft, "draft")), facts)


def choose_grid(target: Target, draft: Draft, speculative: SpeculativeConfig) -> Grid:
    """What was asked for, or what is sensible. Raises BadInput."""
    positions, k = min(target.decoder.positions, draft.decoder.positions), choose_k(speculative, draft)
    if _BUCKETS.value is None:
        return default_grid(draft.block, positions, k)
    grid = parse_grid(_BUCKETS.value, draft.block)
    check_positions(grid, positions)
    if speculative.num_speculative_tokens not in (None, grid.k[-1]):
        raise BadInput(
            f"--speculative_config: num_speculative_tokens is {k}, but the largest k of --buckets is {grid.k[-1]}"
        )
    return grid


def _choose_draft(speculative: SpeculativeConfig) -> str | None:
    """By either flag, or by both alike."""
    if None not in (_DRAFT.value, speculative.model) and _DRAFT.value != speculative.model:
        raise BadInput(f"--draft is {_DRAFT.value}, the model of --speculative_config is {speculative.model}")
    return _DRAFT.value or speculative.model


def describe_draft(draft: Draft) -> str:
    """What was detected, for people."""
    sliding = sum(window is not None for window in draft.windows)
    parts = [
        f"{draft.decoder.layers} layers" + (f", {sliding} of them sliding" if sliding else ""),
        f"blocks of {draft.block}",
        f"taps {', '.join(map(str, draft.target_layer_ids))}",
    ]
    if draft.vocab is not None:
        parts.append(f"a head of its own over {draft.vocab} of {draft.decoder.vocab} tokens")
    return ", ".join(parts)


def _as_given(reference: str) -> str:
    """A directory by its absolute path, so that the bundle finds it from anywhere; a hub id as it is."""
    if reference == EMBEDDED or not Path(reference).expanduser().is_dir():
        return reference
    return str(Path(reference).expanduser().absolute())


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
