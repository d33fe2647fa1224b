"""dflash-bench tpu: estimated times of the executables of a pair on TPUs that are not attached, and their bounds.

Needs the two configs and the TPU compiler, no weights and no TPU. The estimates are the compiler's, see
`compile.analysis.schedule`; nothing runs, so other programs on this machine do not change them.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.benchmarks import tables
from dflash_aot.benchmarks.record import GRID_FLAG, ProgressNote, Record, Sample, setting
from dflash_aot.benchmarks.tables import choose, group_by
from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle_spec import DraftModel, PlannedBundle, TargetModel, choose_formats
from dflash_aot.cache.chips import Topology, parse_topology
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.errors import MALFORMED, BadCheckpoint, BadInput
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint
from dflash_aot.cache.grid import check_positions, parse_grid
from dflash_aot.cache.model_config.config_file import ConfigFile, read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.quantization import read_quantization
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.sampling_state import check_sampling_kinds
from dflash_aot.cache.weight_recipe import CheckpointRole
from dflash_aot.compile.pipeline.build_job import bound_entries
from dflash_aot.compile.pipeline.build_target import name_slice
from dflash_aot.compile.pipeline.compilation_manager import (
    BuildObserver,
    Progress,
    compile_all,
    open_compiler_pool,
)
from dflash_aot.compile.pipeline.deployment import Deployment, plan_deployment
from dflash_aot.compile.programs.programs import TracedPrograms

WEIGHTS = ("float32", "bfloat16", "int8")
TRACED_PREFIX = "call_exported/"  # of operations: what precedes it is the same for all


@dataclass(frozen=True)
class Settings:
    """Flags of `dflash-bench tpu`."""

    target: str = setting(EMBEDDED, "the target: directory, hub id, or the file of a config.json")
    draft: str = setting(EMBEDDED, "its draft: directory, hub id, or the file of a config.json")
    topologies: str = setting("v5e:1x1,v6e:1x1,v5p:1x1x1", "TPU slices, separated by commas")
    buckets: str = setting("batch=1,8 length=1024,4096 k=0,15 prefill=256", GRID_FLAG)
    dtype: str = setting("bfloat16", "of weights and arithmetic", choices=("float32", "bfloat16"))
    weights: str | None = setting(
        None,
        "of linear layers; default: int8 if the config is quantized, else --dtype",
        choices=WEIGHTS,
    )
    draft_weights: str | None = setting(None, "the draft's; default: --weights", choices=WEIGHTS)
    sampling: str = setting("greedy", "what is built, as --sampling of dflash-precompile")
    executable: str | None = setting(
        None,
        "only executables whose label begins so, like 'draft batch=1', and their longest operations",
    )
    jobs: int | None = setting(None, "compiled at a time; default: one per core", least=1)


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """An "executable" for each executable, and an "operation" for each of its longest instructions."""
    topologies = [parse_topology(name) for name in settings.topologies.split(",")]
    sampling = check_sampling_kinds(settings.sampling.split(","), f"--sampling {settings.sampling}")
    configs: dict[CheckpointRole, ConfigFile] = {
        "target": read_model_config(settings.target, "target"),
        "draft": read_model_config(settings.draft, "draft"),
    }
    target = read_target(configs["target"])
    draft = read_draft(configs["draft"], target)
    grid = parse_grid(settings.buckets, draft.verified_block)
    check_positions(grid, {"the target": target.decoder.reach, "the draft": draft.decoder.reach})
    quantized = [role for role, config in configs.items() if read_quantization(config)]
    formats = choose_formats(settings.weights, settings.draft_weights, quantized, settings.dtype)
    select_jax_platforms("cpu")  # for tracing
    for topology in topologies:
        spec = PlannedBundle(
            target=TargetModel(settings.target, target),
            draft=DraftModel(settings.draft, draft),
            dtype=settings.dtype,
            sampling=sampling,
            grid=grid,
            slice=name_slice(topology),
            weight_formats=formats,
        )
        deployment = plan_deployment(spec, topology.chip)
        for entry in compile_entries(deployment, topology, settings, scratch, note):
            yield from list_samples(topology, entry)


def read_model_config(reference: str, role: str) -> ConfigFile:
    """The config of a checkpoint, or the config in a .json file. Raises BadCheckpoint."""
    path = Path(reference).expanduser()
    if path.suffix != ".json":
        return read_config(locate_checkpoint(reference, role))
    try:
        return ConfigFile(path, msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except (OSError, *MALFORMED) as error:
        reason = f"is not the config of a model: {error}"
        raise BadCheckpoint(f"--{role} {reference} {reason}") from error


def compile_entries(
    deployment: Deployment,
    topology: Topology,
    settings: Settings,
    scratch: Path,
    note: ProgressNote,
) -> Iterator[Entry]:
    """Compiles the chosen executables anew. Raises BadInput where none is chosen, BuildFailed."""
    source = TracedPrograms(deployment.programs, deployment.grid)
    labels = [one.label for one in source.signatures]
    source.signatures = [
        one for one in source.signatures if one.label.startswith(settings.executable or "")
    ]
    if not source.signatures:
        raise BadInput(
            f"--executable '{settings.executable}': no label begins so; there are: {', '.join(labels)}"
        )
    observer = _NotingObserver(topology, note)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        store = Store(Path(directory))
        with (
            store.open_for_building(),
            open_compiler_pool(topology, store, settings.jobs, None, observer) as pool,
        ):
            compilation = compile_all(source, pool, store, observer)
    yield from bound_entries(deployment, compilation.entries)


@dataclass
class _NotingObserver(BuildObserver):
    topology: Topology
    note: ProgressNote

    def on_executable(self, progress: Progress) -> None:
        if progress.entry:
            count = f"{progress.done} of {progress.total}"
            self.note(f"{self.topology.name}, {count}: {progress.label}")


def list_samples(topology: Topology, entry: Entry) -> Iterator[Sample]:
    """The executable, then its longest operations; nothing of an executable without an estimate."""
    schedule = entry.cost.schedule
    if schedule is msgspec.UNSET:
        return
    place = {"topology": topology.name, "executable": entry.signature.label}
    figures = msgspec.to_builtins(schedule)
    operations = figures.pop("largest")
    del figures["seconds"]
    yield {
        "kind": "executable",
        **place,
        "program": entry.signature.program,
        "estimate_seconds": entry.cost.estimate_seconds,
        "bound_seconds": entry.cost.bound_seconds,
        "exchange_seconds": entry.cost.exchange_seconds,
        "ratio": entry.cost.ratio,
        "temporaries": entry.memory.temporaries,
        "compile_seconds": entry.seconds,
        **figures,
    }
    for operation in operations:
        yield {"kind": "operation", **place, **operation}


def find_fault(samples: Sequence[Sample]) -> str:
    """Estimates that are missing."""
    return "" if samples else "the compiler estimated nothing"


def make_findings(record: Record) -> tables.Findings:
    """A table of all executables; for chosen executables also tables of their operations."""
    executables = choose(record.samples, kind="executable")
    found = [tabulate_executables(executables)]
    if record.settings["executable"] is not None:
        operations = group_by(choose(record.samples, kind="operation"), "topology", "executable")
        notes = {(one["topology"], one["executable"]): one["notes"] for one in executables}
        for place, chosen in operations.items():
            found.append(tabulate_operations(", ".join(place), chosen, "; ".join(notes[place])))
    return tables.Findings(tuple(found))


def tabulate_executables(executables: Sequence[Any]) -> tables.Table:
    """Estimate, bound and ratio of each."""
    columns = [
        tables.label("topology", "topology"),
        tables.label("executable", "executable"),
        tables.label("estimate ms", "estimate_seconds", format_ms),
        tables.label("bound ms", "bound_seconds", format_ms),
        tables.label("ratio", "ratio", lambda ratio: "–" if ratio is None else f"{ratio:.2f}"),
        tables.label("of it kernels ms", "kernel_seconds", format_positive_ms),
        tables.label("of it waiting ms", "waiting_seconds", format_positive_ms),
    ]
    note = (
        "Estimate: the compiler's cycles, loops times their trip count, over its clock. Bound: bytes and flops over "
        "the chip's peaks. Kernels: of Pallas, from their bytes and flops. Waiting: for main memory."
    )
    return tables.make_table("Estimates", [[one] for one in executables], columns, note)


def tabulate_operations(title: str, operations: Sequence[Any], note: str) -> tables.Table:
    """The longest instructions of one executable."""
    columns = [
        tables.label("instruction", "instruction"),
        tables.label("ms", "seconds", format_ms),
        tables.label("runs", "runs"),
        tables.label("result", "shape"),
        tables.label("operation", "operation", lambda name: name.rpartition(TRACED_PREFIX)[2]),
    ]
    return tables.make_table(title, [[one] for one in operations], columns, note)


def format_ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return tables.format_figure(1e3 * seconds)


def format_positive_ms(seconds: float) -> str:
    """Nothing for no seconds."""
    return format_ms(seconds) if seconds > 0 else ""
