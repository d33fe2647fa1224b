"""Optimized programs of checkpoint pairs, as the TPU compiler makes them: python -m tests.optimized_programs FOLDER

Reads a list of OptimizedPair as JSON from standard input. Writes the optimized HLO of every executable of the pair's
grid to FOLDER/NAME/LABEL.hlo. One process compiles all, because it takes seconds to start.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle_spec import DraftModel, PlannedBundle, Slice, TargetModel
from dflash_aot.cache.chips import TOPOLOGIES
from dflash_aot.cache.environment import libtpu_version
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import choose_compiler_options
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.emulation.portable_hlo import print_optimized_program
from dflash_aot.compile.emulation.translation import make_portable_program
from dflash_aot.compile.models.backend import STACKED_CPU, choose_backend
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.pipeline.build_target import COMPILE_ONLY, describe_devices
from dflash_aot.compile.pipeline.deployment import Deployment
from dflash_aot.compile.programs.lowering import lower_program
from dflash_aot.compile.programs.programs import Programs, TracedPrograms

NEEDS_COMPILER = "needs libtpu" if not libtpu_version() else ""


class OptimizedPair(msgspec.Struct, frozen=True):
    """A pair to compile: name, directories of both checkpoints, and what `dflash-precompile` takes.

    grid: as text; executables for K = 0 are built only where it is named.
    labels: the executables to compile; () for all of the grid.
    """

    name: str
    target: str
    draft: str
    grid: str
    topology: str = "v5e:1x1"
    dtype: str = "float32"
    labels: tuple[str, ...] = ()

    def takes(self, signature: Signature) -> bool:
        return not self.labels or signature.label in self.labels

    @property
    def devices(self) -> int:
        return TOPOLOGIES[self.topology].devices

    def describe(self, platform: str) -> Deployment:
        """The pair with the weights that a TPU takes."""
        target = read_target(read_config(Path(self.target)))
        draft = read_draft(read_config(Path(self.draft)), target)
        modes = ("greedy",)
        chip = TOPOLOGIES[self.topology].chip
        backend = choose_backend("tpu", chip, target, draft) if platform == "tpu" else STACKED_CPU
        programs = Programs(target, draft, self.dtype, TensorParallel(self.devices, backend), modes)
        pair = TargetModel(self.target, target), DraftModel(self.draft, draft)
        where = Slice(platform, self.topology if platform == "tpu" else "", self.devices)
        grid = parse_grid(self.grid, draft.block)
        grid = grid if "k=0" in self.grid else msgspec.structs.replace(grid, k=grid.k[1:])
        spec = PlannedBundle(*pair, self.dtype, modes, grid, slice=where)
        return Deployment(spec, programs, None)

    def trace(self, platform: str) -> TracedPrograms:
        deployment = self.describe(platform)
        return TracedPrograms(deployment.programs, deployment.grid)


class EmulatedPair(TracedPrograms):
    """A program source: the optimized programs in a folder, for CPUs."""

    def __init__(self, pair: OptimizedPair, folder: Path):
        deployment = pair.describe("cpu")
        super().__init__(deployment.programs, deployment.grid)
        self._folder, self._count = folder / pair.name, pair.devices

    def read(self, label: str) -> str:
        """The optimized HLO of an executable."""
        return (self._folder / f"{label}.hlo").read_text()

    def export(self, signature: Signature) -> bytes:
        return self.translate(self.read(signature.label), signature)

    def translate(self, text: str, signature: Signature) -> bytes:
        """A program for CPUs from optimized HLO."""
        return make_portable_program(text, signature, self.known, self._count)


def optimize(pairs: Iterable[OptimizedPair], folder: Path) -> None:
    """Compiles the executables of all pairs in a subprocess."""
    asked = msgspec.json.encode(list(pairs))
    command = [sys.executable, "-m", "tests.optimized_programs", str(folder)]
    subprocess.run(command, input=asked, env={**os.environ, **COMPILE_ONLY}, cwd=Path(__file__).parents[1], check=True)


def main() -> None:
    for pair in msgspec.json.decode(sys.stdin.read(), type=list[OptimizedPair]):
        source, described = pair.trace("tpu"), describe_devices(TOPOLOGIES[pair.topology])
        folder = Path(sys.argv[1]) / pair.name
        folder.mkdir(parents=True)
        for signature in filter(pair.takes, source.signatures):
            lowered = lower_program(source.export(signature), signature, source.known, described.devices)
            options = choose_compiler_options(described.environment, signature.program)
            compiled = lowered.compile(compiler_options=options)
            (folder / f"{signature.label}.hlo").write_text(print_optimized_program(compiled))


if __name__ == "__main__":
    main()
