"""Deployment: a checkpoint pair with its grid, for devices of one kind, and estimates of its memory and round times."""

from collections.abc import Collection

import msgspec

from dflash_aot.cache.bundle.weight_recipe import PLAIN, CheckpointRole, WeightFormat, WeightFormats
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Bucket, Grid
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.sampling_state import SamplingKind, list_modes
from dflash_aot.cache.signature import VERIFY_PROGRAMS, ExecutableId
from dflash_aot.cache.topology import Chip
from dflash_aot.compile.analysis.memory_plan import CompilerFigures, GridProposal, MemoryPlan, MemoryPlanner, cut_grid
from dflash_aot.compile.analysis.roofline import Roofline, RoundBound
from dflash_aot.compile.kernels.kernel_device import choose_kernel_device
from dflash_aot.compile.kernels.tiling import PAGES
from dflash_aot.compile.pipeline.build_target import BuildTarget, count_target_devices, find_chip, name_platform
from dflash_aot.compile.programs.programs import ProgramForm, Programs


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
        return min(self.target.decoder.positions, self.draft.decoder.positions)

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.target, self.draft, self.dtype, self.grid, self.devices, self.programs.formats)


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
    platform, devices = name_platform(build_target), count_target_devices(build_target)
    dtype = dtype or choose_dtype(build_target)
    chip = find_chip(build_target)
    kernels = choose_kernel_device(chip, target, draft) if platform == "tpu" else None
    if kernels and grid.page % PAGES[-1]:
        raise BadInput(f"page={grid.page}: the attention kernel for TPUs needs a multiple of {PAGES[-1]}")
    form = ProgramForm(stacked=platform == "tpu", kernels=kernels, by_page=platform == "cpu")
    programs = Programs(target, draft, dtype, form, devices, sampling, formats)
    return Deployment(target, draft, programs, grid, dtype, platform, devices, chip)


def choose_dtype(build_target: BuildTarget) -> str:
    """The dtype of a build that names none: float32 on a CPU, else bfloat16."""
    return "float32" if name_platform(build_target) == "cpu" else "bfloat16"


def choose_formats(
    weights: str | None, draft_weights: str | None, quantized: Collection[CheckpointRole], dtype: str
) -> WeightFormats:
    """The formats that --weights and --draft_weights name; without the latter, the draft's is the target's.

    Without flags, the layers of a checkpoint that is `quantized` are int8, those of another one have `dtype`.
    Raises BadInput for another name than "int8" and `dtype`.
    """

    def choose(role: CheckpointRole, flag: str, name: str | None) -> WeightFormat:
        if name not in (None, "int8", dtype):
            raise BadInput(f"--{flag} {name}: weights are int8, or have the dtype of the arithmetic, --dtype {dtype}")
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
        raise BadInput(f"--tau {tau:g}: times are predicted for TPUs only, whose chips' figures are known")


def estimate_memory(deployment: Deployment, tau: float | None, measured: CompilerFigures) -> MemoryEstimate | None:
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
    deployment: Deployment, chip: Chip, planner: MemoryPlanner, tau: float | None, measured: CompilerFigures
) -> list[BucketEstimate]:
    """In the grid's order. A round without speculation yields one token, a round with it `tau`."""
    roofline, grid, estimates = deployment.roofline, deployment.grid, []
    for bucket in grid.buckets():
        size = planner.plan(cut_grid(grid, bucket)).total
        bound, estimate = roofline.bound_round(bucket, chip), estimate_round(bucket, deployment, measured)
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


def estimate_round(bucket: Bucket, deployment: Deployment, measured: CompilerFigures) -> float | None:
    """Estimated seconds of a round, greedy if the deployment has greedy executables; None if one has no estimate."""
    sizes = (bucket.batch, bucket.length, bucket.k)
    called: list[ExecutableId] = [(VERIFY_PROGRAMS[list_modes(deployment.programs.pair.sampling)[0]], sizes)]
    called += [("draft", sizes)] if bucket.k else []
    called += [("kv_write", (bucket.batch, bucket.k + 1))] if deployment.grid.k[-1] else []
    found = [measured.seconds[name] for name in called if name in measured.seconds]
    return sum(found) if len(found) == len(called) else None
