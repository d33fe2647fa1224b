"""Output of dflash-precompile: progress bars while it builds, then its plan or report, as tables or as JSON."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from tqdm import tqdm

from dflash_aot.bin.command_line import format_table, print_json, print_lines
from dflash_aot.bin.report_parts import TIME_HEADER, TIME_NOTE, describe_draft, format_time_cells
from dflash_aot.cache.arrays import count_saved_bytes
from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.environment import is_tpu_attached, name_python, read_host_environment
from dflash_aot.cache.printable import escape_line, format_bytes
from dflash_aot.cache.remote.shared_store import StoreReport
from dflash_aot.compile.analysis.memory_plan import describe_proposal, describe_verdict
from dflash_aot.compile.pipeline.compilation_manager import BuildObserver, BuildPhase, Progress
from dflash_aot.compile.pipeline.deployment import (
    BucketEstimate,
    Deployment,
    MemoryEstimate,
)
from dflash_aot.compile.pipeline.precompile import BuildPlan, BuildReport
from dflash_aot.compile.programs.program import BuildEstimate

EXECUTABLE_HEADER = ("program", "bucket", "seconds", "size", "temporaries", "GB", "GFLOP")
COUNT_HEADER = ("XLA GB", "XLA GFLOP")
WORK_NOTE = "GB, GFLOP: what one call must move and compute, calculated from the models' facts"
COUNT_NOTE = "XLA GB, XLA GFLOP: as the compiler counts them; where the layers are a loop, it counts one layer"
BUCKET_HEADER = (
    "batch",
    "length",
    "k",
    "memory",
    "fits",
    "draft ms",
    "verify ms",
    "kv_write ms",
    "round ms",
    "sums ms",
)
BUCKET_NOTE = (
    "memory: of each device, for a grid that ends at this bucket",
    "ms: least time of a full bucket's round, from bytes, flops and the chip's peaks: a bound, not a measurement",
    "sums ms: the part of it in which devices sum arrays, by their bytes and the links' bandwidth, without latency",
)
ESTIMATE_NOTE = "estimate, and with it ms/token: of the whole round, by the compiler's own cycles"


LOG_LINES = 4  # of progress, in a phase


class TerminalObserver(BuildObserver):
    """Shows a build's progress on standard error: as a bar on a terminal, elsewhere as a few lines."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._phase = ""
        self._lines = 0  # of this phase
        self._began = 0.0

    def on_plan(self, deployment: Deployment) -> None:
        print_lines(describe_draft(deployment.draft), file=sys.stderr)

    def on_phase(self, phase: BuildPhase, total: int) -> None:
        """A bar with count, elapsed and remaining time; while compiling also with the last executable begun."""
        if not sys.stderr.isatty():
            self._phase = "compile" if phase == "compile" else "call"
            self._lines = 0
            self._began = time.monotonic()
            return
        options = {"desc": "calling", "leave": False} if phase == "self-test" else {}
        self._bar = tqdm(total=total, unit="exe", file=sys.stderr, dynamic_ncols=True, **options)

    def on_executable(self, progress: Progress) -> None:
        if self._bar is None:
            self._log_progress(progress)
            return
        if progress.entry is None:
            self._bar.set_postfix_str(escape_line(progress.label))
        self._bar.update(progress.done - self._bar.n)

    def _log_progress(self, progress: Progress) -> None:
        """Prints a line after each quarter of the executables."""
        lines = progress.done * LOG_LINES // progress.total
        if lines > self._lines:
            seconds = time.monotonic() - self._began
            self._lines = lines
            self.on_info(
                f"{self._phase}: {progress.done} of {progress.total} executables, {seconds:.0f} s"
            )

    def on_phase_end(self, phase: BuildPhase) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_info(self, message: str) -> None:
        print_lines(message, file=sys.stderr)

    def on_warning(self, message: str) -> None:
        print_lines(f"WARNING: {message}", file=sys.stderr)


# -- the plan


def print_plan(plan: BuildPlan, as_json: bool) -> None:
    """Counts, the expected time and size, memory and time bounds of each bucket, and what padding wastes."""
    deployment = plan.deployment
    estimate = plan.estimate
    count = sum(plan.executables.values())
    if as_json:
        summary = {
            "bundle": plan.bundle,
            "dialect": deployment.draft.dialect,
            "grid": str(deployment.grid),
            "sampling": deployment.programs.pair.sampling,
            "executables": count,
            "present": plan.present,
            "programs": plan.executables,
            "weight_bytes": plan.weight_bytes,
            "state_bytes": plan.state_bytes,
            "saved_state_bytes": count_saved_bytes(deployment.programs.pair, deployment.grid),
            "expected_seconds": estimate and estimate.seconds / plan.jobs,
            "expected_bytes": estimate and round(estimate.bytes),
            "padding_waste": plan.padding_waste,
            "stored_weights": msgspec.to_builtins(dict(plan.conversions)),
        }
        print_json({**summary, **list_memory(plan.memory)})
        return
    shares = ", ".join(f"{axis} {share:.0%}" for axis, share in plan.padding_waste.items())
    lines = [
        *format_table(
            ("program", "executables"),
            [(name, str(number)) for name, number in plan.executables.items()],
        ),
        f"{count} executables for {deployment.grid}{_format_present(plan.present, count)}",
        *([] if plan.present == count else [format_estimate(estimate, plan.jobs)]),
        f"padding of a request that is 1 larger than a size, at worst: {shares}",
        f"{'on all devices' if deployment.devices > 1 else 'on the device'}: weights {format_bytes(plan.weight_bytes)},"
        f" kv and other state {format_bytes(plan.state_bytes)}{_format_saved(deployment)}, and temporaries",
        *_describe_prefixes(deployment),
        *format_memory(plan.memory, deployment),
        *describe_host(deployment),
    ]
    print_lines(*lines, file=sys.stderr)


def _format_saved(deployment: Deployment) -> str:
    count = deployment.grid.saved_states
    if not count:
        return ""
    size = count_saved_bytes(deployment.programs.pair, deployment.grid) // count
    return f" ({count} saved states of {format_bytes(size)} included)"


def _describe_prefixes(deployment: Deployment) -> list[str]:
    target = deployment.spec.target.facts
    if target.caches_prefixes or deployment.grid.saved_states:
        return []
    reason = (
        "its sliding layers keep kv by slot" if target.sliding else "the grid has no saved_states"
    )
    return [f"prefixes are not shared, so that every prompt is computed: {reason}"]


def _format_present(present: int, count: int) -> str:
    if present == count:
        return ": all are there already, nothing is to be compiled"
    return f": {present} are there already, {count - present} are to be compiled" if present else ""


def format_estimate(estimate: BuildEstimate | None, jobs: int) -> str:
    if estimate is None:
        return "build time: no estimate for this platform"
    minutes = estimate.seconds / jobs / 60
    return f"estimate: {minutes:.1f} min to build with --jobs {jobs}, {format_bytes(estimate.bytes)} on disk"


# -- the report


def print_report(report: BuildReport, as_json: bool) -> None:
    """Executable by executable, then bucket by bucket, or the same as JSON."""
    entries = report.entries
    compiled = report.compiled
    size = sum(entry.bytes for entry in entries)
    found = len(entries) - len(compiled)
    deployment = report.deployment
    if as_json:
        summary = {
            "bundle": report.bundle,
            "dialect": deployment.draft.dialect,
            "sampling": deployment.programs.pair.sampling,
            "executables": len(entries),
            "compiled": len(compiled),
            "reused": found,
            "seconds": report.seconds,
            "bytes": size,
            "self_tests": sum(entry.self_test is not None for entry in entries),
            "store": report.store and msgspec.to_builtins(report.store),
            "findings": list(report.findings),
            "stored_weights": msgspec.to_builtins(dict(report.conversions)),
            "entries": [list_entry(deployment, entry, entry.key in compiled) for entry in entries],
        }
        print_json({**summary, **list_memory(report.memory)})
        return
    rows = [_format_entry(deployment, entry, entry.key in compiled) for entry in entries]
    lines = [*format_table(list_columns(deployment), rows), *list_notes(deployment)]
    lines += format_memory(report.memory, deployment)
    lines += [f"WARNING: {finding}" for finding in report.findings]
    if report.store:
        lines += _format_store(report.store)
    kept = f", {found} were there already" if found else ""
    done = (
        f"{len(compiled)} compiled{kept}"
        if compiled
        else f"nothing to compile: all {len(entries)} were there already"
    )
    lines += describe_host(deployment)
    lines.append(f"{done}, in {report.seconds:.1f} s; {format_bytes(size)} in {report.bundle}")
    print_lines(*lines, file=sys.stderr)


def describe_host(deployment: Deployment) -> list[str]:
    """What the host of a TPU that is not attached has to have installed; nothing for attached devices."""
    if deployment.platform != "tpu" or is_tpu_attached():
        return []
    here = read_host_environment("tpu")
    return [
        f"The TPU host needs the versions of this machine: JAX {here.jax} and libtpu {here.libtpu}, which "
        f"{name_python(here.jax)} installs"
    ]


def _format_store(store: StoreReport) -> list[str]:
    counts = f"{store.hits} executables found, {store.misses} not found, {store.written} written"
    return [*(f"WARNING: {failure}" for failure in store.failures), f"store {store.url}: {counts}"]


def list_entry(deployment: Deployment, entry: Entry, compiled: bool) -> dict[str, Any]:
    """One executable for JSON; `work` is calculated from the models' facts, `compiler` is the compiler's count."""
    work = deployment.roofline.cost(entry.signature)
    chip = deployment.chip
    return {
        "program": entry.signature.program,
        "bucket": entry.signature.bucket,
        "seconds": entry.seconds,
        "bytes": entry.bytes,
        "temporaries": entry.memory.temporaries,
        "code": entry.memory.code,
        "work": {"bytes": work.bytes, "flops": work.flops},
        "compiler": {"bytes": entry.cost.bytes_accessed, "flops": entry.cost.flops},
        "bound_seconds": chip and work.bound_seconds(chip, deployment.devices),
        "exchange_seconds": chip and work.exchange_seconds(chip, deployment.devices),
        "estimate_seconds": entry.cost.estimate_seconds,
        "ratio": entry.cost.ratio,
        "compiled": compiled,
    }


def list_columns(deployment: Deployment) -> tuple[str, ...]:
    """The columns of the table. On a TPU the last are times: the compiler counts one pass of a loop over layers."""
    return (*EXECUTABLE_HEADER, *(TIME_HEADER if deployment.chip else COUNT_HEADER))


def list_notes(deployment: Deployment) -> tuple[str, ...]:
    return WORK_NOTE, TIME_NOTE if deployment.chip else COUNT_NOTE


def _format_entry(deployment: Deployment, entry: Entry, compiled: bool) -> tuple[str, ...]:
    work = deployment.roofline.cost(entry.signature)
    cost = entry.cost
    counts = [f"{figure / 1e9:.3f}" for figure in (cost.bytes_accessed, cost.flops)]
    return (
        entry.signature.program,
        " ".join(f"{axis}={extent}" for axis, extent in entry.signature.bucket.items()),
        f"{entry.seconds:.1f}" if compiled else "kept",
        format_bytes(entry.bytes),
        format_bytes(entry.memory.temporaries),
        *(f"{figure / 1e9:.3f}" for figure in (work.bytes, work.flops)),
        *(format_time_cells(cost) if deployment.chip else counts),
    )


# -- memory and time bounds, of plan and report


def list_memory(estimate: MemoryEstimate | None) -> dict[str, Any]:
    """The estimate for JSON; nothing without a chip's figures."""
    if estimate is None:
        return {}
    memory = estimate.memory
    available = estimate.chip.available_bytes
    hbm = {
        **msgspec.structs.asdict(memory),
        "total": memory.total,
        "available": available,
        "fits": estimate.fits,
    }
    return {
        "chip": estimate.chip.name,
        "devices": estimate.devices,
        "hbm_bytes": hbm,
        "fits_up_to": msgspec.structs.asdict(estimate.proposal),
        "tau": estimate.tau,
        "replaced": msgspec.to_builtins(estimate.replaced),
        "buckets": [_list_bucket(bucket) for bucket in estimate.buckets],
    }


def _list_bucket(bucket: BucketEstimate) -> dict[str, Any]:
    return {
        **msgspec.structs.asdict(bucket.bucket),
        "hbm_bytes": bucket.hbm_bytes,
        "fits": bucket.fits,
        "bound_seconds": {**msgspec.structs.asdict(bucket.bound), "round": bucket.bound.round},
        "bound_seconds_per_token": bucket.seconds_per_token,
        "estimate_seconds": bucket.estimate,
        "estimate_seconds_per_token": bucket.estimate_per_token,
    }


def format_memory(estimate: MemoryEstimate | None, deployment: Deployment) -> list[str]:
    """The estimate for people; nothing without a chip's figures."""
    if estimate is None:
        return []
    available = estimate.chip.available_bytes
    verdict = "fits" if estimate.fits else "does not fit"
    return [
        *_format_buckets(estimate.buckets, estimate.tau),
        *BUCKET_NOTE,
        *([ESTIMATE_NOTE] if any(bucket.estimate for bucket in estimate.buckets) else []),
        f"{verdict} {estimate.chip.name}: {describe_verdict(estimate.memory, available)}",
        describe_proposal(estimate.proposal, deployment.grid),
        *(
            f"{one.axis}={one.size} saves nothing: {one.axis}={one.larger} takes as long. Drop it from --buckets"
            for one in estimate.replaced
        ),
    ]


def _format_buckets(buckets: Sequence[BucketEstimate], tau: float | None) -> list[str]:
    estimated = any(bucket.estimate for bucket in buckets)
    header = (*BUCKET_HEADER, *(["estimate ms"] if estimated else []))
    header = header if tau is None else (*header, f"ms/token, τ={tau:g}")
    return format_table(
        header, [_format_bucket(bucket, estimated)[: len(header)] for bucket in buckets]
    )


def _format_bucket(bucket: BucketEstimate, estimated: bool) -> list[str]:
    """`estimated`: whether some bucket has an estimate; then the time per token follows from the estimate."""
    bound = bucket.bound
    last = [bucket.estimate, bucket.estimate_per_token] if estimated else [bucket.seconds_per_token]
    times = (bound.draft, bound.verify, bound.kv_write, bound.round, bound.exchange, *last)
    return [
        *(str(size) for size in msgspec.structs.astuple(bucket.bucket)),
        f"{bucket.hbm_bytes / 1e9:.2f} GB",
        "yes" if bucket.fits else "no",
        *("-" if seconds is None or not seconds else f"{seconds * 1e3:.2f}" for seconds in times),
    ]
