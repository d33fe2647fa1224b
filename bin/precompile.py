"""dflash-precompile: builds the bundle of a target and its draft, before deployment. Needs only their two config.json.

dflash-precompile [--target DIR|HUB_ID[@REVISION] --draft DIR|HUB_ID[@REVISION]] [--bundle DIR]
    [--target_revision COMMIT --draft_revision COMMIT]
    [--buckets "batch=1,4 length=256,1024 k=0,7,15 prefill=64,256"] [--plan] [--tau T] [--json]
    [--platform cpu|cuda|tpu] [--topology v5e:2x2] [--tensor_parallel N] [--dtype float32|bfloat16] [--jobs N]
    [--weights float32|bfloat16|int8] [--draft_weights float32|bfloat16|int8]
    [--sampling greedy,sample] [--exact] [--replace] [--retrace] [--noself_test] [--store URL]
    [--executor local|ray] [--ray_address HOST:PORT]
    [--speculative_config '{"method": "dflash", "model": DRAFT, "num_speculative_tokens": K}']
dflash-precompile --rebuild BUNDLE [--require_signature PUBLIC.pem] [--bundle DIR] [--replace] [--jobs N]
    [--noself_test] [--store URL] [--executor local|ray] [--ray_address HOST:PORT] [--tau T] [--json]
"""

import os
import sys
from typing import Any

from absl import flags

from dflash_aot.bin.command_line import (
    add_revision,
    choose_draft,
    choose_pair,
    default_bundle,
    define_revisions,
    run_command,
)
from dflash_aot.bin.precompile_report import TerminalObserver, print_plan, print_report
from dflash_aot.cache.chips import parse_topology
from dflash_aot.cache.environment import is_tpu_attached
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.grid import EXAMPLE_BUCKETS
from dflash_aot.cache.model_config.speculative_config import parse_speculative_config
from dflash_aot.cache.sampling_state import DEFAULT_SAMPLING
from dflash_aot.compile.pipeline.compilation_manager import ATTACHED_JOBS
from dflash_aot.compile.pipeline.precompile import BuildReport, plan_build, precompile, rebuild
from dflash_aot.compile.pipeline.ray_pool import LOCAL_RAY

# Flags whose values are keyword arguments of the same name: of `plan_build`, of every build, of what compiles.
ASKED = ("platform", "topology", "tensor_parallel", "dtype", "weights", "draft_weights", "exact")
COMMON = ("replace", "jobs", "tau")
COMPILING = ("self_test", "store")
RAY = ("executor", "ray_address")
WITH_REBUILD = frozenset(
    {*COMMON, *COMPILING, *RAY, "rebuild", "require_signature", "bundle", "json"}
)
NOT_WITH_PLAN = ("retrace", *COMPILING, *RAY)
FLAGS = flags.FlagValues()
_TARGET = flags.DEFINE_string(
    "target",
    None,
    "the target model: a directory, or a hub id in the local cache",
    flag_values=FLAGS,
)
_DRAFT = flags.DEFINE_string(
    "draft",
    None,
    "its DFlash draft: a directory, or a hub id in the local cache; default without both: the embedded pair",
    flag_values=FLAGS,
)
_REVISIONS = define_revisions(FLAGS)
_BUNDLE = flags.DEFINE_string(
    "bundle",
    None,
    "the directory to build in; default: in the user's cache directory",
    flag_values=FLAGS,
)
_BUCKETS = flags.DEFINE_string(
    "buckets",
    None,
    f"the grid, such as '{EXAMPLE_BUCKETS}', or a .toml file with these keys",
    flag_values=FLAGS,
)
flags.DEFINE_enum(
    "platform", None, ["cpu", "cuda", "tpu"], "default: the attached devices", flag_values=FLAGS
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "the TPU slice to build for, such as v5e:2x2; it need not be attached",
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "tensor_parallel",
    None,
    "number of devices that share every layer; default: all devices of --topology, else 1",
    lower_bound=1,
    flag_values=FLAGS,
)
flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "default: float32 on cpu, else bfloat16",
    flag_values=FLAGS,
)
flags.DEFINE_enum(
    "weights",
    None,
    ["float32", "bfloat16", "int8"],
    "linear layers and vocabulary head: int8, with a scale per output channel; default: int8 for a quantized "
    "checkpoint, else --dtype",
    flag_values=FLAGS,
)
flags.DEFINE_enum(
    "draft_weights",
    None,
    ["float32", "bfloat16", "int8"],
    "the draft's; default: --weights if given, else as above",
    flag_values=FLAGS,
)
_SAMPLING = flags.DEFINE_string(
    "sampling",
    ",".join(DEFAULT_SAMPLING),
    "modes of verification to build, of greedy, sample and constrain (structured output), and prompt_logprobs: prefill "
    "chunks that score the prompt; a request that needs another one is refused",
    flag_values=FLAGS,
)
_SPECULATIVE = flags.DEFINE_string(
    "speculative_config", None, "draft and K, as in vLLM's JSON", flag_values=FLAGS
)
flags.DEFINE_integer(
    "jobs",
    None,
    f"executables compiled at a time; default: {ATTACHED_JOBS}; one per core for a TPU that is not attached; one per "
    "CPU of a Ray cluster",
    lower_bound=1,
    flag_values=FLAGS,
)
_EXECUTOR = flags.DEFINE_enum(
    "executor",
    "local",
    ["local", "ray"],
    "where to compile: on this machine, or in tasks of a Ray cluster",
    flag_values=FLAGS,
)
_RAY_ADDRESS = flags.DEFINE_string(
    "ray_address",
    None,
    "default: RAY_ADDRESS, else a local Ray cluster that ends with the build",
    flag_values=FLAGS,
)
flags.DEFINE_bool(
    "self_test",
    True,
    "call every new executable once and record its outputs, which dflash-bundle verify --deep compares",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "store",
    None,
    "a shared store, a directory or a URL such as s3://bucket/place: executables are looked up and added there",
    flag_values=FLAGS,
)
_REBUILD = flags.DEFINE_string(
    "rebuild",
    None,
    "compile this bundle's programs again with this machine's compiler; needs no checkpoint",
    flag_values=FLAGS,
)
_REQUIRE_SIGNATURE = flags.DEFINE_string(
    "require_signature",
    None,
    "with --rebuild: PEM file of a public key; refuse a bundle that its owner did not sign",
    flag_values=FLAGS,
)
flags.DEFINE_bool(
    "exact",
    False,
    "build exactly this grid and sampling; otherwise what the bundle has for the same pair and devices is kept",
    flag_values=FLAGS,
)
flags.DEFINE_bool(
    "replace",
    False,
    "replace a bundle of another pair, dtype, format or slice; otherwise such a bundle is left alone",
    flag_values=FLAGS,
)
flags.DEFINE_bool(
    "retrace",
    False,
    "trace every program, even if nothing that programs are made from has changed since the bundle was built",
    flag_values=FLAGS,
)
_PLAN = flags.DEFINE_bool(
    "plan", False, "compile nothing, show what would be built", flag_values=FLAGS
)
flags.DEFINE_float(
    "tau",
    None,
    "tokens per round, if known: predicts the least time per token (TPU)",
    flag_values=FLAGS,
)
_JSON = flags.DEFINE_bool(
    "json", False, "print the report as JSON on standard output", flag_values=FLAGS
)


def main() -> None:
    """The console script."""
    sys.exit(run_command("dflash-precompile", __doc__, FLAGS, run_precompile))


def run_precompile() -> int:
    """Builds or rebuilds a bundle and prints the report; with --plan, prints what would be built.

    Returns the exit code: that of a failed build for a plan that does not fit the devices.
    """
    if _REBUILD.value is not None:
        print_report(_rebuild(_REBUILD.value), _JSON.value)
        return 0
    if _REQUIRE_SIGNATURE.value is not None:
        raise BadInput(
            "--require_signature needs --rebuild: a bundle that is not built yet is not signed"
        )
    arguments = {**_read_request(), **_read_flags(*ASKED, *COMMON), "observer": TerminalObserver()}
    if _PLAN.value:
        _check_plan_flags()
        build_plan = plan_build(**arguments)
        print_plan(build_plan, _JSON.value)
        fits = build_plan.memory is None or build_plan.memory.fits
        return 0 if fits else BuildFailed.exit_code
    compiling = {**_read_flags("retrace", *COMPILING), "ray_address": _choose_ray_address()}
    print_report(precompile(**arguments, **compiling), _JSON.value)
    return 0


def _read_flags(*names: str) -> dict[str, Any]:
    return {name: FLAGS[name].value for name in names}


def _check_plan_flags() -> None:
    """Raises BadInput for flags that a plan would ignore."""
    if given := sorted(f"--{name}" for name in NOT_WITH_PLAN if FLAGS[name].present):
        raise BadInput(
            f"--plan compiles nothing and reads no store: {', '.join(given)} cannot be given with it"
        )


def _read_request() -> dict[str, Any]:
    """Pair, directory, grid and sampling, as keyword arguments of `precompile`. Raises BadInput."""
    speculative = parse_speculative_config(_SPECULATIVE.value or "{}")
    target, draft = choose_pair(
        add_revision("target", _TARGET.value, _REVISIONS["target"].value),
        add_revision("draft", choose_draft(_DRAFT.value, speculative), _REVISIONS["draft"].value),
    )
    topology = (
        None
        if _TOPOLOGY.value is None or is_tpu_attached()
        else parse_topology(_TOPOLOGY.value).name
    )
    return {
        "target": target,
        "draft": draft,
        "bundle": _BUNDLE.value or default_bundle(target, draft, topology),
        "grid": _BUCKETS.value,
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "num_speculative_tokens_per_batch_size": speculative.num_speculative_tokens_per_batch_size,
        "sampling": _SAMPLING.value.split(",") if _SAMPLING.value else [],
    }


def _rebuild(bundle: str) -> BuildReport:
    """Rebuilds a bundle. Raises BadInput for flags that ask for another bundle than the given one."""
    if not bundle:
        raise BadInput("--rebuild '': name the bundle")
    if others := sorted(name for name in FLAGS if FLAGS[name].present and name not in WITH_REBUILD):
        raise BadInput(
            f"--rebuild compiles {bundle} as it was built: --{', --'.join(others)} cannot be given with it. It takes "
            f"--{', --'.join(sorted(WITH_REBUILD - {'rebuild'}))}"
        )
    return rebuild(
        bundle,
        _BUNDLE.value or None,
        require_signature=_REQUIRE_SIGNATURE.value,
        observer=TerminalObserver(),
        ray_address=_choose_ray_address(),
        **_read_flags(*COMMON, *COMPILING),
    )


def _choose_ray_address() -> str | None:
    """The Ray cluster that compiles; None: this machine. Raises BadInput."""
    if _EXECUTOR.value == "ray":
        return _RAY_ADDRESS.value or os.environ.get("RAY_ADDRESS") or LOCAL_RAY
    if _RAY_ADDRESS.value is not None:
        raise BadInput(
            f"--ray_address {_RAY_ADDRESS.value} without --executor ray: no cluster is used"
        )
    return None


if __name__ == "__main__":
    main()
