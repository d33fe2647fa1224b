"""Deployment: a checkpoint pair with its grid for devices of one kind, its estimates, changes of its grid."""

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.errors import BadInput, CorruptBundle, MissingBundle
from dflash_aot.cache.grid import Bucket, Grid
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.sampling_state import SAMPLING_KINDS, SamplingKind, list_modes
from dflash_aot.cache.signature import (
    SAMPLED_PROGRAMS,
    VERIFY_PROGRAMS,
    ExecutableId,
    PairShapes,
    Signature,
)
from dflash_aot.cache.topology import Chip, Topology
from dflash_aot.cache.weight_recipe import PLAIN, CheckpointRole, WeightFormat, WeightFormats
from dflash_aot.compile.analysis.memory_plan import (
    CompilerFigures,
    GridProposal,
    MemoryPlan,
    MemoryPlanner,
    count_tokens,
    cut_grid,
)
from dflash_aot.compile.analysis.roofline import Roofline, RoundBound
from dflash_aot.compile.kernels.kernel_device import PAGES, choose_kernel_device
from dflash_aot.compile.pipeline.build_target import (
    BuildTarget,
    count_target_devices,
    find_chip,
    name_platform,
)
from dflash_aot.compile.programs.programs import ProgramForm, Programs

# -- build estimate: seconds and bytes that a build will take, from the figures of measured builds

MAX_COUNTED_TOKENS = 512  # tokens; wider calls are loops, which take no longer to compile


class BuildEstimate(msgspec.Struct, frozen=True):
    """What compiling takes.

    Attributes:
        seconds: of one core.
        bytes: on disk, compressed, of executable and program.
    """

    seconds: float
    bytes: float

    def __add__(self, other: "BuildEstimate") -> "BuildEstimate":
        return BuildEstimate(self.seconds + other.seconds, self.bytes + other.bytes)

    def times(self, factor: float) -> "BuildEstimate":
        return BuildEstimate(self.seconds * factor, self.bytes * factor)


# Of one executable by platform and program: a fixed part, and a part per unit. On TPU the layers are a loop, and the
# unit is a token of the call. On CPU the layers are unrolled, and the unit is a layer. Measured with jax 0.10.2 on two
# cores of an idle x86 server: Qwen3-4B and its draft, for v5e (libtpu 0.0.42.1, one process each) and for CPU. Bytes on
# CPU: of targets with 3 to 28 layers, jax 0.12.0.1.
MEASURED_BUILDS: dict[str, dict[str, tuple[BuildEstimate, BuildEstimate]]] = {
    "tpu": {
        "prefill": (BuildEstimate(3.3, 300e3), BuildEstimate(0.02, 4e3)),
        "scored_prefill": (BuildEstimate(4.3, 500e3), BuildEstimate(0.02, 4e3)),
        "draft": (BuildEstimate(4.0, 400e3), BuildEstimate(0.03, 4.5e3)),
        "verify": (BuildEstimate(3.3, 330e3), BuildEstimate(0.03, 5.5e3)),
        **dict.fromkeys(SAMPLED_PROGRAMS, (BuildEstimate(4.6, 650e3), BuildEstimate(0.1, 8e3))),
        "kv_write": (BuildEstimate(2.2, 110e3), BuildEstimate(0.003, 1e3)),
        "rounds": (BuildEstimate(7.0, 800e3), BuildEstimate(0.06, 10e3)),
        "sampled_rounds": (BuildEstimate(8.5, 1100e3), BuildEstimate(0.13, 12e3)),
        "move": (BuildEstimate(1.8, 75e3), BuildEstimate(0.0, 0.0)),
        "admit": (BuildEstimate(1.6, 25e3), BuildEstimate(0.0, 0.0)),
    },
    "cpu": {
        "prefill": (BuildEstimate(0.0, 70e3), BuildEstimate(0.4, 15e3)),
        "scored_prefill": (BuildEstimate(0.7, 80e3), BuildEstimate(0.4, 15e3)),
        "draft": (BuildEstimate(0.0, 100e3), BuildEstimate(0.36, 5e3)),
        "verify": (BuildEstimate(0.0, 80e3), BuildEstimate(0.4, 15e3)),
        **dict.fromkeys(SAMPLED_PROGRAMS, (BuildEstimate(1.5, 145e3), BuildEstimate(0.4, 20e3))),
        "kv_write": (BuildEstimate(0.0, 30e3), BuildEstimate(0.25, 2e3)),
        "rounds": (BuildEstimate(1.5, 180e3), BuildEstimate(0.5, 19e3)),
        "sampled_rounds": (BuildEstimate(3.0, 190e3), BuildEstimate(0.5, 20e3)),
        "move": (BuildEstimate(0.4, 9e3), BuildEstimate(0.0, 0.0)),
        "admit": (BuildEstimate(0.2, 9e3), BuildEstimate(0.0, 0.0)),
    },
}


def estimate_build(
    signatures: Iterable[Signature], pair: PairShapes, platform: str
) -> BuildEstimate | None:
    """The estimate of a whole build; None for a platform without measured builds."""
    if platform not in MEASURED_BUILDS:
        return None
    total = BuildEstimate(0.0, 0.0)
    for signature in signatures:
        fixed, per_unit = MEASURED_BUILDS[platform][signature.program]
        total += fixed + per_unit.times(_count_units(signature, pair, platform))
    return total


def _count_units(signature: Signature, pair: PairShapes, platform: str) -> int:
    if platform == "tpu":
        return min(count_tokens(signature, pair.block), MAX_COUNTED_TOKENS)
    return (pair.draft_kv if signature.program in ("draft", "kv_write") else pair.target_kv).layers


# -- deployments, and estimates of their memory and times


class Deployment(msgspec.Struct, frozen=True):
    """What is built, and for what.

    Attributes:
        target: facts of the target.
        draft: facts of the draft.
        programs: their programs.
        grid: the grid whose executables are built.
        dtype: "float32" or "bfloat16", of plain weights and arithmetic.
        platform: "cpu", "gpu" or "tpu".
        devices: the number of devices that share every layer.
        chip: the TPU chip's figures; None for other devices.
    """

    target: Target
    draft: Draft
    programs: Programs
    grid: Grid
    dtype: str
    platform: str
    devices: int
    chip: Chip | None

    @property
    def positions(self) -> int:
        """The sequence length that both models were made for."""
        return min(self.target.decoder.reach, self.draft.decoder.reach)

    @property
    def roofline(self) -> Roofline:
        return Roofline(
            self.target, self.draft, self.dtype, self.grid, self.devices, self.programs.formats
        )


class BucketEstimate(msgspec.Struct, frozen=True):
    """One bucket of a deployment on a TPU.

    Attributes:
        bucket: its sizes.
        hbm_bytes: memory of each device for a grid that ends at this bucket.
        fits: whether the device has that memory.
        bound: the least time that a full bucket's round takes.
        estimate: the compiler's estimate of that time; None where one of the executables has none.
        seconds_per_token: the least time per token; None where τ is unknown or too large for the bucket's k.
        estimate_per_token: the estimated time per token; None as for `seconds_per_token`, and without an estimate.
    """

    bucket: Bucket
    hbm_bytes: int
    fits: bool
    bound: RoundBound
    estimate: float | None
    seconds_per_token: float | None
    estimate_per_token: float | None


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Device memory of a deployment on a TPU, and its buckets.

    Attributes:
        chip: the chip's figures.
        devices: the number of devices that share every layer.
        memory: bytes of each device.
        proposal: how far the grid could be extended.
        tau: tokens per round, if known.
        buckets: in the grid's order.
    """

    chip: Chip
    devices: int
    memory: MemoryPlan
    proposal: GridProposal
    tau: float | None
    buckets: tuple[BucketEstimate, ...]

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.chip.available_bytes


def plan_deployment(
    target: Target,
    draft: Draft,
    grid: Grid,
    dtype: str | None,
    sampling: tuple[SamplingKind, ...],
    build_target: BuildTarget,
    formats: WeightFormats = PLAIN,
) -> Deployment:
    """A pair on a build target; `dtype` None: float32 on a CPU, else bfloat16.

    Raises BadInput where the devices cannot share the pair, or its kernels cannot copy pages of that size.
    """
    platform = name_platform(build_target)
    devices = count_target_devices(build_target)
    dtype = dtype or choose_dtype(build_target)
    chip = find_chip(build_target)
    kernels = choose_kernel_device(chip, target, draft) if platform == "tpu" else None
    if kernels and grid.page % PAGES[-1]:
        raise BadInput(
            f"page={grid.page}: the attention kernel for TPUs needs a multiple of {PAGES[-1]}"
        )
    form = ProgramForm(stacked=platform == "tpu", kernels=kernels, by_page=platform == "cpu")
    programs = Programs(target, draft, dtype, form, devices, sampling, formats)
    return Deployment(target, draft, programs, grid, dtype, platform, devices, chip)


def choose_dtype(build_target: BuildTarget) -> str:
    """The dtype of a build that names none: float32 on a CPU, else bfloat16."""
    return "float32" if name_platform(build_target) == "cpu" else "bfloat16"


def choose_formats(
    weights: str | None,
    draft_weights: str | None,
    quantized: Collection[CheckpointRole],
    dtype: str,
) -> WeightFormats:
    """The formats that --weights and --draft_weights name; without --draft_weights, --weights counts for the draft too.

    Without flags, the layers of a `quantized` checkpoint are int8, and the layers of other checkpoints have `dtype`.
    Raises BadInput for another name than "int8" and `dtype`.
    """

    def choose(role: CheckpointRole, flag: str, name: str | None) -> WeightFormat:
        if name not in (None, "int8", dtype):
            raise BadInput(
                f"--{flag} {name}: weights are int8, or have the dtype of the arithmetic, --dtype {dtype}"
            )
        return "int8" if name == "int8" or (name is None and role in quantized) else "plain"

    target = choose("target", "weights", weights)
    return WeightFormats(target, choose("draft", "draft_weights", draft_weights or weights))


def check_tau(tau: float | None, grid: Grid, chip: Chip | None) -> None:
    """Raises BadInput for a τ that no round of the grid can yield, or where the devices' figures are unknown."""
    if tau is None:
        return
    if not 1 <= tau <= grid.k[-1] + 1:
        raise BadInput(
            f"--tau {tau:g}: a round yields between 1 and {grid.k[-1] + 1} tokens, because the largest k is "
            f"{grid.k[-1]}"
        )
    if chip is None:
        raise BadInput(
            f"--tau {tau:g}: times are predicted for TPUs only, whose chips' figures are known"
        )


def estimate_memory(
    deployment: Deployment, tau: float | None, measured: CompilerFigures
) -> MemoryEstimate | None:
    """Memory and round times, from the compiler's figures where `measured` has them; None without figures."""
    if (chip := deployment.chip) is None:
        return None
    planner = MemoryPlanner(deployment.programs, deployment.devices, tiled=True, measured=measured)
    return MemoryEstimate(
        chip=chip,
        devices=deployment.devices,
        memory=planner.plan(deployment.grid),
        proposal=planner.propose(deployment.grid, chip.available_bytes, deployment.positions),
        tau=tau,
        buckets=tuple(_estimate_buckets(deployment, chip, planner, tau, measured)),
    )


def _estimate_buckets(
    deployment: Deployment,
    chip: Chip,
    planner: MemoryPlanner,
    tau: float | None,
    measured: CompilerFigures,
) -> list[BucketEstimate]:
    """In the grid's order. A round without speculation yields one token, a round with it `tau`."""
    roofline = deployment.roofline
    grid = deployment.grid
    estimates = []
    for bucket in grid.buckets():
        size = planner.plan(cut_grid(grid, bucket)).total
        bound = roofline.bound_round(bucket, chip)
        estimate = estimate_round(bucket, deployment, measured)
        yielded = tau if bucket.k else 1.0
        if yielded is not None and yielded > bucket.k + 1:
            yielded = None
        estimates.append(
            BucketEstimate(
                bucket=bucket,
                hbm_bytes=size,
                fits=size <= chip.available_bytes,
                bound=bound,
                estimate=estimate,
                seconds_per_token=yielded and bound.round / yielded,
                estimate_per_token=yielded and estimate and estimate / yielded,
            )
        )
    return estimates


def estimate_round(
    bucket: Bucket, deployment: Deployment, measured: CompilerFigures
) -> float | None:
    """Estimated seconds of a round, greedy if the deployment has greedy executables; None if one has no estimate."""
    sizes = (bucket.batch, bucket.length, bucket.k)
    called: list[ExecutableId] = [
        (VERIFY_PROGRAMS[list_modes(deployment.programs.pair.sampling)[0]], sizes)
    ]
    called += [("draft", sizes)] if bucket.k else []
    called += [("kv_write", (bucket.batch, bucket.k + 1))] if deployment.grid.k[-1] else []
    found = [measured.seconds[name] for name in called if name in measured.seconds]
    return sum(found) if len(found) == len(called) else None


# -- grid changes: how the grid that a user asks for combines with that of the bundle where the build writes


class GridChange(msgspec.Struct, frozen=True):
    """What is built in place of the requested grid and sampling.

    Attributes:
        grid: the grid to build.
        sampling: the modes of verification to build, and whether prompts can be scored.
        message: what is kept of the bundle's grid in addition to the requested grid, or why nothing is kept; "" if
            nothing differs.
    """

    grid: Grid
    sampling: tuple[SamplingKind, ...]
    message: str = ""


def add_to_bundle(bundle: Path, requested: Deployment, build_target: BuildTarget) -> GridChange:
    """The requested grid and sampling with those of the bundle added, if it is of the same pair and devices.

    Raises BadInput where no grid can have the sizes of both.
    """
    grid = requested.grid
    sampling = requested.programs.pair.sampling
    try:
        manifest = read_manifest(bundle)
    except MissingBundle:
        return GridChange(grid, sampling)
    except CorruptBundle as error:
        return GridChange(grid, sampling, f"the grid of the bundle is not kept: {error}")
    if other := _find_difference(manifest, requested, build_target):
        return GridChange(grid, sampling, _describe_replacement(manifest, other))
    try:
        both = grid.united(manifest.grid)
    except BadInput as error:
        raise BadInput(
            f"{bundle} has the grid '{manifest.grid}': {error}. Name another bundle, or build only what is asked for "
            "with --exact"
        ) from error
    modes = tuple(mode for mode in SAMPLING_KINDS if mode in (*sampling, *manifest.sampling))
    if both.k[-1] + 1 > both.length[0]:
        raise BadInput(
            f"{bundle} has the grid '{manifest.grid}': with '{grid}' added, length={both.length[0]} is too short to "
            f"verify k={both.k[-1]} tokens. Name another bundle, or build only what is asked for with --exact"
        )
    if (both, modes) == (grid, sampling):
        return GridChange(both, modes)
    kept = f"what the bundle has is kept: the grid is '{both}', sampling {','.join(modes)}; --exact drops the rest"
    return GridChange(both, modes, kept)


def describe_loss(bundle: Path, requested: Deployment, build_target: BuildTarget) -> str:
    """What leaves the bundle where exactly the requested grid is built; "" if nothing does."""
    try:
        manifest = read_manifest(bundle)
    except CorruptBundle:  # nothing can be read, so nothing is lost; MissingBundle is one
        return ""
    if other := _find_difference(manifest, requested, build_target):
        return _describe_replacement(manifest, other)
    labels = {signature.label for signature in requested.programs.list_signatures(requested.grid)}
    dropped = [entry.signature for entry in manifest.entries if entry.signature.label not in labels]
    if not dropped:
        return ""
    return (
        f"{len(dropped)} of {len(manifest.entries)} executables leave the bundle "
        f"({_count_programs([signature.program for signature in dropped])}); its grid was '{manifest.grid}', sampling "
        f"{','.join(manifest.sampling)}. dflash-bundle gc removes their files"
    )


def _describe_replacement(manifest: Manifest, other: str) -> str:
    return f"the bundle's {len(manifest.entries)} executables are replaced: they are for {other}"


def _count_programs(names: Collection[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


def _find_difference(
    manifest: Manifest, requested: Deployment, build_target: BuildTarget
) -> str | None:
    """What a bundle is for, where that is not what is requested."""
    built = manifest.environment
    if (manifest.target.facts, manifest.draft.facts) != (requested.target, requested.draft):
        return "another pair"
    if manifest.dtype != requested.dtype:
        return f"another dtype, {manifest.dtype}"
    if (formats := manifest.formats) != requested.programs.formats:
        return f"other weights: {formats.target} in the target, {formats.draft} in the draft"
    topology = (
        build_target.name
        if isinstance(build_target, Topology)
        else build_target.environment.topology
    )
    if (built.platform, built.topology, built.device_count) != (
        requested.platform,
        topology,
        requested.devices,
    ):
        return f"other devices, {built.device_count} of {built.topology or built.device_kind}"
    return None
