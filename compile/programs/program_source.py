"""Where programs come from: a pair of models that is traced, or a bundle that holds what was traced before."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.weight_recipe import WeightRecipe
from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.signature import ArraySpec, Signature, state_arrays
from dflash_aot.compile.programs.lowering import export_program
from dflash_aot.compile.programs.programs import Programs


class ProgramSource(Protocol):
    """Every signature of a grid, the state and weights that they name (`known` by name), each as portable StableHLO."""

    @property
    def signatures(self) -> Sequence[Signature]: ...

    @property
    def state(self) -> tuple[ArraySpec, ...]: ...

    @property
    def recipes(self) -> tuple[WeightRecipe, ...]: ...

    @property
    def known(self) -> Mapping[str, ArraySpec]: ...

    def export(self, signature: Signature) -> bytes: ...


class TracedPrograms:
    """The programs of a pair, for `devices` of a kind that share it."""

    def __init__(self, programs: Programs, grid: Grid, platform: str, devices: int = 1):
        self.signatures, self.known = programs.list_signatures(grid), programs.arrays_by_name(grid)
        self.state, self.recipes = state_arrays(programs.pair, grid), programs.recipes()
        self._programs, self._platform, self._devices = programs, platform, devices

    def export(self, signature: Signature) -> bytes:
        function = self._programs.function(signature)
        return export_program(signature, function, self.known, self._platform, self._devices)


class BundledPrograms:
    """The programs of a bundle, whose checkpoints nobody needs."""

    def __init__(self, manifest: Manifest, store: Store):
        self.signatures = [entry.signature for entry in manifest.entries]
        self.state, self.recipes, self.known = manifest.state, manifest.weights, manifest.arrays_by_name()
        self._entries = {entry.signature.label: entry for entry in manifest.entries}
        self._manifest, self._store = manifest, store

    def export(self, signature: Signature) -> bytes:
        """Raises CorruptBundle where the bundle does not hold it as it was written."""
        entry, remedy = self._entries[signature.label], self._manifest.build_command(self._store.bundle)
        try:
            program = self._store.read_program(entry)
        except CorruptBundle as error:
            raise CorruptBundle(f"{error}: {remedy}") from error
        if (found := executable_key(program, signature, self._manifest.environment)) != entry.key:
            raise CorruptBundle(
                f"its key is {found}, the manifest promises {entry.key}: signature, environment or program are not "
                f"those that were compiled. Build it again from its checkpoints: {remedy}"
            )
        return program
