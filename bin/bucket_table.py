"""Bucket by bucket: what a grid that ends there takes of a device, and how fast its rounds can be at best."""

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from dflash_aot.bin.command_line import format_table
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Bucket, Grid
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.topology import Chip
from dflash_aot.compile.analysis.memory_plan import (
    CompilerFigures,
    MemoryPlanner,
    cut_grid,
    describe_proposal,
    describe_verdict,
)
from dflash_aot.compile.analysis.roofline import Roofline, RoundBound
from dflash_aot.compile.programs.programs import Programs

NOTE = """memory: of each device, by a grid that ends at this bucket
ms: what a full bucket's round takes at least, from bytes and flops and the chip's peaks: a bound, not a measurement"""


class Deployment(msgspec.Struct, frozen=True):
    """What is built, and for what; `chip` is None where no figures of it are known."""

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
        """What both models were made for."""
        return min(self.target.decoder.positions, self.draft.decoder.positions)

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.target, self.draft, self.dtype, self.grid, self.devices)


class BucketRow(msgspec.Struct, frozen=True):
    """One bucket. `hbm_bytes` of one device; `seconds_per_token` is None where τ is not known or not possible."""

    bucket: Bucket
    hbm_bytes: int
    fits: bool
    bound: RoundBound
    seconds_per_token: float | None

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        bound = {**msgspec.structs.asdict(self.bound), "round": self.bound.round}
        rest = {"hbm_bytes": self.hbm_bytes, "fits": self.fits, "bound_seconds": bound}
        return {**msgspec.structs.asdict(self.bucket), **rest, "bound_seconds_per_token": self.seconds_per_token}


def check_tau(tau: float | None, grid: Grid, chip: Chip | None) -> None:
    """Tokens per round: the target's own one, and at most all that are verified. Raises BadInput."""
    if tau is None:
        return
    if not 1 <= tau <= grid.k[-1] + 1:
        raise BadInput(
            f"--tau {tau:g}: a round yields between 1 and {grid.k[-1] + 1} tokens, the largest k being {grid.k[-1]}"
        )
    if chip is None:
        raise BadInput(f"--tau {tau:g}: times are predicted for TPUs, of whose chips the figures are known")


def list_buckets(deployment: Deployment, chip: Chip, footprints: MemoryPlanner, tau: float | None) -> list[BucketRow]:
    """One row per bucket, in the grid's order. Without speculation a round yields one token, else `tau`."""
    roofline, grid, rows = deployment.roofline, deployment.grid, []
    for bucket in grid.buckets():
        size = footprints.plan(cut_grid(grid, bucket)).total
        bound = roofline.bound_round(bucket, chip)
        yielded = tau if bucket.k else 1.0
        possible = yielded is not None and yielded <= bucket.k + 1
        per_token = bound.round / yielded if yielded and possible else None
        rows.append(BucketRow(bucket, size, size <= chip.available_bytes, bound, per_token))
    return rows


def describe_memory(deployment: Deployment, tau: float | None, measured: CompilerFigures) -> dict[str, Any]:
    """HBM and bounds as JSON; nothing for a chip without figures."""
    if (chip := deployment.chip) is None:
        return {}
    footprints = _footprints(deployment, measured)
    footprint = footprints.plan(deployment.grid)
    proposal = footprints.propose(deployment.grid, chip.available_bytes, deployment.positions)
    hbm = {**msgspec.structs.asdict(footprint), "total": footprint.total, "available": chip.available_bytes}
    return {
        "chip": chip.name,
        "devices": deployment.devices,
        "hbm_bytes": {**hbm, "fits": footprint.total <= chip.available_bytes},
        "fits_up_to": msgspec.structs.asdict(proposal),
        "tau": tau,
        "buckets": [row.fields() for row in list_buckets(deployment, chip, footprints, tau)],
    }


def print_memory(deployment: Deployment, tau: float | None, measured: CompilerFigures) -> None:
    """The same for people; nothing for a chip without figures."""
    if (chip := deployment.chip) is None:
        return
    footprints, grid = _footprints(deployment, measured), deployment.grid
    print(format_buckets(list_buckets(deployment, chip, footprints, tau), tau), NOTE, sep="\n", file=sys.stderr)
    footprint, available = footprints.plan(grid), chip.available_bytes
    verdict = "fits" if footprint.total <= available else "does not fit"
    proposal = describe_proposal(footprints.propose(grid, available, deployment.positions), grid)
    print(f"{verdict} {chip.name}: {describe_verdict(footprint, available)}", proposal, sep="\n", file=sys.stderr)


def format_buckets(rows: Sequence[BucketRow], tau: float | None) -> str:
    """Aligned; the column of τ where it is known."""
    header = ["batch", "length", "k", "memory", "fits", "draft ms", "verify ms", "kv_write ms", "round ms"]
    if tau is not None:
        header.append(f"ms/token, τ={tau:g}")
    cells = [_format_row(row)[: len(header)] for row in rows]
    return format_table(header, cells)


def _format_row(row: BucketRow) -> list[str]:
    times = (row.bound.draft, row.bound.verify, row.bound.kv_write, row.bound.round, row.seconds_per_token)
    return [
        *(str(size) for size in msgspec.structs.astuple(row.bucket)),
        f"{row.hbm_bytes / 1e9:.2f} GB",
        "yes" if row.fits else "no",
        *("-" if seconds is None or not seconds else f"{seconds * 1e3:.2f}" for seconds in times),
    ]


def _footprints(deployment: Deployment, measured: CompilerFigures) -> MemoryPlanner:
    return MemoryPlanner(deployment.programs, deployment.devices, tiled=True, measured=measured)
