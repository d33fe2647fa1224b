"""dflash-precompile: builds the bundle of a target and its draft, before deploy. Only the two config.json are needed.

dflash-precompile [--target DIR|HUB_ID --draft DIR|HUB_ID] [--bundle DIR]
    [--buckets "batch=1,4 length=256,1024 k=0,7,15 prefill=64,256"] [--plan] [--json]
    [--speculative_config '{"method": "dflash", "model": DRAFT, "num_speculative_tokens": K}']
"""

import json
import sys
from collections import Counter
from pathlib import Path

import jax
from absl import flags
from tqdm import tqdm

from dflash_aot.bin.command import choose_pair, default_bundle, format_bytes, format_table, run_command
from dflash_aot.cache.architecture import Draft, Target
from dflash_aot.cache.checkpoint import EMBEDDED, locate_checkpoint
from dflash_aot.cache.config_file import read_config
from dflash_aot.cache.draft_config import read_draft
from dflash_aot.cache.environment import Environment, read_environment
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import EXAMPLE, Grid, check_positions, default_grid, parse_grid
from dflash_aot.cache.manifest import SCHEMA, DraftModel, Entry, Manifest, TargetModel
from dflash_aot.cache.signature import state_arrays
from dflash_aot.cache.speculative_config import SpeculativeConfig, check_depth, parse_speculative_config
from dflash_aot.cache.store import Store
from dflash_aot.cache.target_config import read_target
from dflash_aot.compile.manager import Progress, Report, build
from dflash_aot.compile.programs import Programs

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
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "default: float32 on cpu, else bfloat16", flag_values=FLAGS
)
_SAMPLING = flags.DEFINE_string(
    "sampling", "greedy", "kinds of verification to build; greedy is the one there is", flag_values=FLAGS
)
_SPECULATIVE = flags.DEFINE_string(
    "speculative_config", None, "the draft and K as vLLM's JSON says them", flag_values=FLAGS
)
_JOBS = flags.DEFINE_integer("jobs", 2, "executables compiled at a time", lower_bound=1, flag_values=FLAGS)
_PLAN = flags.DEFINE_bool("plan", False, "compile nothing, say what would be built", flag_values=FLAGS)
_JSON = flags.DEFINE_bool("json", False, "the report as JSON on standard output", flag_values=FLAGS)


def main() -> None:
    """The console script."""
    sys.exit(run_command("dflash-precompile", __doc__, FLAGS, precompile))


def precompile() -> None:
    """Reads the pair, builds what is missing, publishes the bundle, reports."""
    if _SAMPLING.value != "greedy":
        raise BadInput(f"--sampling {_SAMPLING.value}: this version builds greedy verification only")
    speculative = parse_speculative_config(_SPECULATIVE.value or "{}")
    references = choose_pair(_TARGET.value, _choose_draft(speculative))
    target, draft = read_pair(*references)
    grid = choose_grid(target, draft, speculative)
    platform = _start_platform()
    dtype = _DTYPE.value or ("float32" if platform == "cpu" else "bfloat16")
    bundle = Path(_BUNDLE.value) if _BUNDLE.value else default_bundle(*references)
    programs = Programs(target, draft, dtype)
    _say(f"draft of {draft.dialect}'s format: {describe_draft(draft)}")
    if _PLAN.value:
        report_plan(programs, grid, bundle, draft.dialect)
        return
    environment, store = read_environment(platform), Store(bundle)
    with store.open_for_building():
        report = _build_with_progress(programs, grid, environment, store)
        store.publish(
            Manifest(
                schema=SCHEMA,
                environment=environment,
                target=TargetModel(_as_given(references[0]), target),
                draft=DraftModel(_as_given(references[1]), draft),
                dtype=dtype,
                grid=grid,
                state=state_arrays(programs.pair, grid),
                weights=programs.recipes(),
                entries=report.entries,
            )
        )
    report_build(report, bundle, draft.dialect)


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


def report_plan(programs: Programs, grid: Grid, bundle: Path, dialect: str) -> None:
    """What a build would make, and the memory that serving it takes apart from temporaries and code."""
    signatures = programs.signatures(grid)
    counts = Counter(signature.program for signature in signatures)
    weights = sum(recipe.bytes for recipe in programs.recipes())
    state = sum(array.bytes for array in state_arrays(programs.pair, grid))
    if _JSON.value:
        plan = {"bundle": str(bundle), "dialect": dialect, "grid": str(grid)}
        print(
            json.dumps(
                {
                    **plan,
                    "executables": len(signatures),
                    "programs": counts,
                    "weight_bytes": weights,
                    "state_bytes": state,
                }
            )
        )
        return
    print(
        format_table(("program", "executables"), [(name, str(count)) for name, count in counts.items()]),
        file=sys.stderr,
    )
    _say(f"{len(signatures)} executables for {grid}")
    _say(f"on the device: weights {format_bytes(weights)}, kv and other state {format_bytes(state)}, and temporaries")


def report_build(report: Report, bundle: Path, dialect: str) -> None:
    """The closing table, or the same as JSON."""
    entries, compiled = report.entries, report.compiled
    size = sum(entry.bytes for entry in entries)
    if _JSON.value:
        summary = {"bundle": str(bundle), "dialect": dialect, "executables": len(entries), "compiled": len(compiled)}
        rows = [{**_describe(entry), "compiled": entry.key in compiled} for entry in entries]
        print(
            json.dumps(
                {
                    **summary,
                    "reused": len(entries) - len(compiled),
                    "seconds": report.seconds,
                    "bytes": size,
                    "entries": rows,
                }
            )
        )
        return
    rows_text = [
        (
            entry.signature.program,
            " ".join(f"{axis}={extent}" for axis, extent in entry.signature.bucket.items()),
            f"{entry.seconds:.1f}" if entry.key in compiled else "kept",
            format_bytes(entry.bytes),
            format_bytes(entry.memory.temporaries),
        )
        for entry in entries
    ]
    print(format_table(("program", "bucket", "seconds", "size", "temporaries"), rows_text), file=sys.stderr)
    kept = f", {len(entries) - len(compiled)} were there already" if len(compiled) < len(entries) else ""
    done = (
        f"{len(compiled)} compiled{kept}" if compiled else f"nothing to compile: all {len(entries)} were there already"
    )
    _say(f"{done}, in {report.seconds:.1f} s; {format_bytes(size)} in {bundle}")


def _describe(entry: Entry) -> dict:
    return {
        "program": entry.signature.program,
        "bucket": entry.signature.bucket,
        "seconds": entry.seconds,
        "bytes": entry.bytes,
        "temporaries": entry.memory.temporaries,
    }


def _build_with_progress(programs: Programs, grid: Grid, environment: Environment, store: Store) -> Report:
    """A bar with count, elapsed and remaining time and the current bucket."""
    with tqdm(unit="exe", file=sys.stderr, dynamic_ncols=True) as bar:

        def observe(progress: Progress) -> None:
            bar.total = progress.total
            bar.set_postfix_str(progress.label, refresh=progress.entry is None)
            bar.update(progress.done - bar.n)

        return build(programs, grid, environment, store, observe, _JOBS.value)


def _start_platform() -> str:
    """Starts JAX on the platform asked for, or the attached one. Raises BadInput."""
    if _PLATFORM.value == "cpu":
        jax.config.update("jax_platforms", "cpu")  # an accelerator that is not used is not started
    try:
        return jax.devices(_PLATFORM.value)[0].platform
    except RuntimeError as error:
        raise BadInput(f"--platform {_PLATFORM.value}: no such device here: {error}") from error


def _as_given(reference: str) -> str:
    """A directory by its absolute path, so that the bundle finds it from anywhere; a hub id as it is."""
    if reference == EMBEDDED or not Path(reference).expanduser().is_dir():
        return reference
    return str(Path(reference).expanduser().absolute())


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
