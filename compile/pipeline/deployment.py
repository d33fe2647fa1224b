"""Deployment: a bundle's spec with its programs, and its estimates of time and memory."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import msgspec

from dflash_aot.cache.bundle_spec import BundleSpec
from dflash_aot.cache.chips import Chip
from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.cache.grid import Bucket, Grid
from dflash_aot.cache.model_config.architecture import Draft
from dflash_aot.cache.model_config.quantization import (
    Quantization,
    WeightConversion,
    plan_conversion,
)
from dflash_aot.cache.model_config.tensor_names import list_modules, list_unconverted, names_any
from dflash_aot.cache.sampling_state import list_modes
from dflash_aot.cache.signature import VERIFY, ExecutableId
from dflash_aot.cache.weight_recipe import CheckpointRole
from dflash_aot.compile.analysis.memory_plan import (
    CompilerFigures,
    GridProposal,
    MemoryPlan,
    MemoryPlanner,
    cut_grid,
)
from dflash_aot.compile.models.backend import choose_backend
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.programs.programs import Programs, Roofline, RoundBound

LEAST_SAVED = 0.97  # of the time of a larger bucket; a bucket that takes more of it saves nothing

# -- deployments, and estimates of their memory and times


class Deployment(msgspec.Struct, frozen=True):
    """What is built, and for what.

    Attributes:
        spec: the pair, its grid and its devices.
        programs: the pair's programs.
        chip: the TPU chip's figures; None for other devices.
    """

    spec: BundleSpec
    programs: Programs
    chip: Chip | None

    @property
    def draft(self) -> Draft:
        """Facts of the draft."""
        return self.spec.draft.facts

    @property
    def grid(self) -> Grid:
        """The grid whose executables are built."""
        return self.spec.grid

    @property
    def dtype(self) -> str:
        """ "float32" or "bfloat16", of plain weights and arithmetic."""
        return self.spec.dtype

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        return self.spec.slice.platform

    @property
    def devices(self) -> int:
        """The number of devices that share every layer."""
        return self.spec.slice.devices

    @property
    def roofline(self) -> Roofline:
        target = self.spec.target.facts
        return Roofline(target, self.draft, self.dtype, self.grid, self.devices, self.spec.formats)


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


class ReplacedSize(msgspec.Struct, frozen=True):
    """A size of the grid whose buckets save nothing: those of a larger size take as long.

    Attributes:
        axis: "batch", "length" or "k".
        size: what the grid could do without.
        larger: the size that serves instead.
    """

    axis: str
    size: int
    larger: int


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Device memory of a deployment on a TPU, and its buckets.

    Attributes:
        chip: the chip's figures.
        devices: the number of devices that share every layer.
        memory: bytes of each device.
        proposal: how far the grid could be extended.
        tau: tokens per round, if known.
        buckets: in the grid's order.
        replaced: sizes that save nothing.
    """

    chip: Chip
    devices: int
    memory: MemoryPlan
    proposal: GridProposal
    tau: float | None
    buckets: tuple[BucketEstimate, ...]
    replaced: tuple[ReplacedSize, ...]

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.chip.available_bytes


def plan_deployment(spec: BundleSpec, chip: Chip | None) -> Deployment:
    """The deployment of a spec on devices with the figures of `chip`, None if they are unknown.

    Raises BadInput where the devices cannot share the pair, or its kernels cannot copy pages of that size.
    """
    facts = spec.target.facts, spec.draft.facts
    backend = choose_backend(spec.slice.platform, chip, *facts)
    backend.check_page(spec.grid.page)
    tp = TensorParallel(spec.slice.devices, backend)
    programs = Programs(*facts, spec.dtype, tp, spec.sampling, spec.formats)
    return Deployment(spec, programs, chip)


def check_unquantized(stored: Mapping[CheckpointRole, Quantization], programs: Programs) -> None:
    """Raises BadCheckpoint for a list of unquantized modules that names none of its model."""
    for role, quantization in stored.items():
        modules = list_modules(recipe for recipe in programs.recipes() if recipe.checkpoint == role)
        if not names_any(quantization.unquantized, modules, role):
            raise BadCheckpoint(
                f"{quantization.unquantized.key} names no module of the {role}: expected names of layers that are not "
                "quantized"
            )


def plan_conversions(
    stored: Mapping[CheckpointRole, Quantization], programs: Programs
) -> dict[CheckpointRole, WeightConversion]:
    """What the bundle makes of the weights of quantized checkpoints."""
    formats: dict[CheckpointRole, str] = {
        "target": programs.formats.target,
        "draft": programs.formats.draft,
    }
    dtype = programs.pair.dtype
    return {
        role: plan_conversion(
            quantization,
            dtype if formats[role] == "plain" else formats[role],
            dtype,
            list_unconverted(programs.recipes(), role),
        )
        for role, quantization in stored.items()
    }


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
    kernels = deployment.programs.tp.backend.kernels
    buckets = tuple(_estimate_buckets(deployment, chip, planner, tau, measured))
    return MemoryEstimate(
        chip=chip,
        devices=deployment.devices,
        memory=planner.plan(deployment.grid),
        proposal=planner.propose(deployment.grid, chip.available_bytes, deployment.spec.positions),
        tau=tau,
        buckets=buckets,
        replaced=tuple(
            find_replaced(
                deployment.grid,
                {bucket.bucket: bucket.estimate for bucket in buckets},
                _bound_kv(deployment, chip) if kernels is not None and kernels.attends else None,
            )
        ),
    )


def _bound_kv(deployment: Deployment, chip: Chip) -> dict[Bucket, float]:
    """The least seconds that each full bucket takes for its rows' kv."""
    bound = deployment.roofline.bound_round
    buckets = deployment.grid.buckets()
    shortest = [msgspec.structs.replace(bucket, length=bucket.k + 1) for bucket in buckets]
    return {
        bucket: bound(bucket, chip).round - bound(short, chip).round
        for bucket, short in zip(buckets, shortest, strict=True)
    }


def find_replaced(
    grid: Grid,
    seconds: Mapping[Bucket, float | None],
    kv_seconds: Mapping[Bucket, float] | None,
) -> Iterator[ReplacedSize]:
    """The sizes of the grid whose buckets take as long as those of a larger size.

    A batch or a K above 0 is replaced by the next larger size if every bucket with it takes at least LEAST_SAVED of the
    larger bucket's time. All lengths but the longest are replaced if attention costs each row its own length only.

    seconds: estimated, of full buckets. kv_seconds: the part of them that attention takes for its rows' kv; None where
    attention costs every row the bucket's length.
    """
    kv = kv_seconds or dict.fromkeys(seconds, 0.0)

    def takes_as_long(one: Bucket, larger: Bucket) -> bool:
        here, there = seconds[one], seconds[larger]
        if not (here and there):
            return False
        return here >= LEAST_SAVED * (there - kv[larger] + kv[one])

    if kv_seconds is not None:
        for length in grid.length[:-1]:
            yield ReplacedSize("length", length, grid.capacity)
    for axis, sizes in (("batch", grid.batch), ("k", [k for k in grid.k if k])):
        for size, larger in pairwise(sizes):
            pairs = [
                (bucket, msgspec.structs.replace(bucket, **{axis: larger}))
                for bucket in seconds
                if getattr(bucket, axis) == size
            ]
            if all(takes_as_long(*pair) for pair in pairs):
                yield ReplacedSize(axis, size, larger)


def _estimate_buckets(
    deployment: Deployment,
    chip: Chip,
    planner: MemoryPlanner,
    tau: float | None,
    measured: CompilerFigures,
) -> list[BucketEstimate]:
    """The buckets in the grid's order. A round without speculation yields one token, a round with it `tau`."""
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
        (VERIFY.name(list_modes(deployment.programs.pair.sampling)[0]), sizes)
    ]
    called += [("draft", sizes)] if bucket.k else []
    called += [("kv_write", (bucket.batch, bucket.k + 1))] if deployment.grid.k[-1] else []
    found = [measured.seconds[name] for name in called if name in measured.seconds]
    return sum(found) if len(found) == len(called) else None
