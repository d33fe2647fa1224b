"""dflash-precompile: builds the bundle of a target and its draft, before deploy. Only the two config.json are needed.

dflash-precompile [--target DIR|HUB_ID --draft DIR|HUB_ID] [--bundle DIR]
    [--buckets "batch=1,4 length=256,1024 k=0,7,15 prefill=64,256"] [--plan] [--tau T] [--json]
    [--platform cpu|cuda|tpu] [--topology v5e:2x2] [--tensor_parallel N] [--dtype float32|bfloat16] [--jobs N]
    [--sampling greedy,sample]
    [--speculative_config '{"method": "dflash", "model": DRAFT, "num_speculative_tokens": K}']
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
from absl import flags
from tqdm import tqdm

from dflash_aot.bin.bucket_table import Deployment, check_tau
from dflash_aot.bin.build_report import report_build
from dflash_aot.bin.command import choose_pair, default_bundle, run_command, start_jax
from dflash_aot.bin.plan import report_plan
from dflash_aot.cache.architecture import Draft, Target
from dflash_aot.cache.checkpoint import EMBEDDED, locate_checkpoint
from dflash_aot.cache.config_file import read_config
from dflash_aot.cache.draft_config import read_draft
from dflash_aot.cache.environment import Environment, is_tpu_attached
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.grid import EXAMPLE, Grid, check_positions, default_grid, parse_grid
from dflash_aot.cache.manifest import SCHEMA, DraftModel, Manifest, TargetModel
from dflash_aot.cache.sampling import SAMPLINGS, check_sampling
from dflash_aot.cache.signature import Signature, state_arrays
from dflash_aot.cache.speculative_config import SpeculativeConfig, check_depth, parse_speculative_config
from dflash_aot.cache.store import Store
from dflash_aot.cache.target_config import read_target
from dflash_aot.cache.topology import CHIPS, TOPOLOGIES, Chip, Topology, parse_topology
from dflash_aot.compile.builder import Builder
from dflash_aot.compile.footprint import Measured, check_fits, read_measured
from dflash_aot.compile.machine import Machine, attach, count_devices
from dflash_aot.compile.manager import Progress, Report, Site, build
from dflash_aot.compile.programs import Programs
from dflash_aot.compile.quality import find_layout_conflicts
from dflash_aot.compile.threads import Threads
from dflash_aot.compile.worker import Order
from dflash_aot.compile.workers import Workers

ATTACHED_JOBS = 2  # each compilation for an attached device has threads of its own
MOST_WORKERS = 8
Place = Machine | Topology
FLAGS = flags.FlagValues()
_TARGET = flags.DEFINE_string(
    "target", None, "the target: a directory, or a hub id in the local cache", flag_values=FLAGS
)
_DRAFT = flags.DEFINE_string("draft", None, "its DFlash draft, likewise; neither: the embedded pair", flag_values=FLAGS)
_BUNDLE = flags.DEFINE_string("bundle", None, "where to build; default: the user's cache directory", flag_values=FLAGS)
_BUCKETS = flags.DEFINE_string(
    "buckets", None, f"the grid, such as '{EXAMPLE}', or a .toml with these keys", flag_values=FLAGS
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
    ",".join(SAMPLINGS),
    "kinds of verification to build: greedy, sample or both; a request that asks for another one is refused",
    flag_values=FLAGS,
)
_SPECULATIVE = flags.DEFINE_string(
    "speculative_config", None, "the draft and K as vLLM's JSON says them", flag_values=FLAGS
)
_JOBS = flags.DEFINE_integer(
    "jobs",
    None,
    f"executables compiled at a time; default: {ATTACHED_JOBS}, for a TPU that is not here one per two cores",
    lower_bound=1,
    flag_values=FLAGS,
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
    """Reads the pair, builds what is missing, publishes the bundle, reports."""
    sampling = check_sampling(_SAMPLING.value.split(",") if _SAMPLING.value else [], f"--sampling '{_SAMPLING.value}'")
    speculative = parse_speculative_config(_SPECULATIVE.value or "{}")
    references = choose_pair(_TARGET.value, _choose_draft(speculative))
    target, draft = read_pair(*references)
    grid = choose_grid(target, draft, speculative)
    place = choose_place()
    platform, devices = _describe_place(place)
    dtype = _DTYPE.value or ("float32" if platform == "cpu" else "bfloat16")
    bundle = (
        Path(_BUNDLE.value)
        if _BUNDLE.value
        else default_bundle(*references, place.name if isinstance(place, Topology) else None)
    )
    programs = Programs(target, draft, dtype, stacked=platform == "tpu", devices=devices, sampling=sampling)
    deployment = Deployment(target, draft, programs, grid, dtype, platform, devices, find_chip(place))
    check_tau(_TAU.value, grid, deployment.chip)
    _say(f"draft of {draft.dialect}'s format: {describe_draft(draft)}")
    if _PLAN.value:
        report_plan(deployment, bundle, choose_jobs(place), _TAU.value, _JSON.value)
        return
    _check_memory(deployment, None)
    store = Store(bundle)
    with store.open_for_building():
        order = Order(target, draft, dtype, grid, str(bundle), sampling)
        with open_site(place, programs, order, store) as (site, environment):
            report = _build_with_progress(programs.signatures(grid), site)
        if conflicts := find_layout_conflicts(report.entries):
            raise BuildFailed("executables do not fit together, nothing is published:\n  " + "\n  ".join(conflicts))
        _check_memory(deployment, read_measured(report.entries))
        store.publish(
            Manifest(
                schema=SCHEMA,
                environment=environment,
                target=TargetModel(_as_given(references[0]), target),
                draft=DraftModel(_as_given(references[1]), draft),
                dtype=dtype,
                sampling=sampling,
                grid=grid,
                state=state_arrays(programs.pair, grid),
                weights=programs.recipes(),
                entries=report.entries,
            )
        )
    report_build(deployment, report, bundle, _TAU.value, _JSON.value)


def read_pair(target: str, draft: str) -> tuple[Target, Draft]:
    facts = read_target(read_config(locate_checkpoint(target, "target")))
    return facts, read_draft(read_config(locate_checkpoint(draft, "draft")), facts)


def choose_grid(target: Target, draft: Draft, speculative: SpeculativeConfig) -> Grid:
    """What was asked for, or what is sensible. Raises BadInput."""
    positions, k = min(target.decoder.positions, draft.decoder.positions), check_depth(speculative, draft)
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
        f"taps {', '.join(map(str, draft.taps))}",
    ]
    if draft.vocab is not None:
        parts.append(f"a head of its own over {draft.vocab} of {draft.decoder.vocab} tokens")
    return ", ".join(parts)


@contextmanager
def open_site(place: Place, programs: Programs, order: Order, store: Store) -> Iterator[tuple[Site, Environment]]:
    """Where the executables are built, and the environment that they are built for."""
    if isinstance(place, Topology):
        with Workers(place, order, choose_jobs(place)) as workers:
            yield workers, workers.environment
    else:
        with Threads(Builder(programs, order.grid, place, store), choose_jobs(place)) as threads:
            yield threads, place.environment


def choose_jobs(place: Place) -> int:
    """How many executables are compiled at a time.

    One TPU compiler kept 1.6 of two cores busy; a second was 0-7 % faster for 10 % more work and another gigabyte.
    """
    if _JOBS.value or isinstance(place, Machine):
        return _JOBS.value or ATTACHED_JOBS
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(max(cores // 2, 1), MOST_WORKERS)


def find_chip(place: Place) -> Chip | None:
    """The figures of the chips to build for; None where none are known."""
    if isinstance(place, Topology):
        return place.chip
    return next((chip for chip in CHIPS if chip.device_kind == place.environment.device_kind), None)


def _check_memory(deployment: Deployment, measured: Measured | None) -> None:
    """Before and after a build: see `check_fits`."""
    grid, chip = deployment.grid, deployment.chip
    if chip is None:
        return
    doubt = check_fits(deployment.programs, grid, deployment.devices, chip, deployment.positions, measured)
    if doubt:
        _say(f"WARNING: {doubt}")


def _build_with_progress(signatures: Sequence[Signature], site: Site) -> Report:
    """A bar with count, elapsed and remaining time and the bucket that was begun last."""
    with tqdm(total=len(signatures), unit="exe", file=sys.stderr, dynamic_ncols=True) as bar:

        def observe(progress: Progress) -> None:
            if progress.entry is None:
                bar.set_postfix_str(progress.label)
            bar.update(progress.done - bar.n)

        return build(signatures, site, observe)


def choose_place() -> Place:
    """The attached devices, or the slice to describe to the compiler where no TPU is attached; starts JAX.

    Raises BadInput.
    """
    topology = parse_topology(_TOPOLOGY.value) if _TOPOLOGY.value is not None else None
    platform = _PLATFORM.value or ("tpu" if topology else None)
    if topology and platform != "tpu":
        raise BadInput(f"--topology {topology.name} is a TPU's, but --platform is {platform}")
    start_jax(platform)
    if platform == "tpu" and not is_tpu_attached():
        if topology is None:
            raise BadInput(f"--platform tpu: none is attached. Say which with --topology: {', '.join(TOPOLOGIES)}")
        count_devices(topology, _TENSOR_PARALLEL.value)
        return topology
    try:
        platform = platform or jax.default_backend()
    except RuntimeError as error:  # of the user's JAX_PLATFORMS
        raise BadInput(f"no device: {error}") from error
    return attach(platform, topology, _TENSOR_PARALLEL.value)


def _describe_place(place: Place) -> tuple[str, int]:
    """Platform and number of devices."""
    if isinstance(place, Topology):
        return "tpu", place.devices
    return place.environment.platform, place.environment.device_count


def _as_given(reference: str) -> str:
    """A directory by its absolute path, so that the bundle finds it from anywhere; a hub id as it is."""
    if reference == EMBEDDED or not Path(reference).expanduser().is_dir():
        return reference
    return str(Path(reference).expanduser().absolute())


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
