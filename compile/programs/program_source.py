"""Program sources: programs traced from a pair of models, or read from a bundle that was built before."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from dflash_aot.cache.arrays import ArraySpec, state_arrays
from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.environment import jaxlib_version
from dflash_aot.cache.errors import BuildFailed, CorruptBundle
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.weight_recipe import WeightRecipe
from dflash_aot.compile.programs.lowering import check_program, export_program
from dflash_aot.compile.programs.programs import Programs


class ProgramSource(Protocol):
    """What a build compiles: the signatures of a grid, and the program of each as portable StableHLO.

    Attributes:
        signatures: one per executable.
        state: the device state that the programs share.
        recipes: how the runtime makes the weights.
        known: state and weights by name, to which the signatures refer.
    """

    @property
    def signatures(self) -> Sequence[Signature]: ...

    @property
    def state(self) -> tuple[ArraySpec, ...]: ...

    @property
    def recipes(self) -> tuple[WeightRecipe, ...]: ...

    @property
    def known(self) -> Mapping[str, ArraySpec]: ...

    def export(self, signature: Signature) -> bytes:
        """The program of a signature as portable StableHLO."""
        ...


class TracedPrograms:
    """The programs of a pair for a grid, traced."""

    def __init__(self, programs: Programs, grid: Grid):
        self.signatures = programs.list_signatures(grid)
        self.known = programs.arrays_by_name(grid)
        self.state = state_arrays(programs.pair, grid)
        self.recipes = programs.recipes()
        self._programs = programs

    def export(self, signature: Signature) -> bytes:
        """Traces the program and lowers it to StableHLO."""
        function = self._programs.function(signature)
        programs = self._programs
        return export_program(signature, function, self.known, programs.backend, programs.devices)


class BundledPrograms:
    """The programs of a bundle, for a rebuild that needs no checkpoints.

    Attributes:
        manifest: the bundle's.
        store: the bundle's.
    """

    def __init__(self, manifest: Manifest, store: Store):
        self.signatures = [entry.signature for entry in manifest.entries]
        self.state = manifest.state
        self.recipes = manifest.weights
        self.known = manifest.arrays_by_name()
        self._entries = {entry.signature.label: entry for entry in manifest.entries}
        self.manifest = manifest
        self.store = store

    def check_readable(self) -> None:
        """Raises BuildFailed if the installed JAX cannot read the first program; the others are of the same version."""
        entry = self.manifest.entries[0]
        try:
            check_program(self.store.read_program(entry))
        except CorruptBundle:
            return  # the build reports damaged files one by one
        except BuildFailed as error:
            raise BuildFailed(
                f"{self.store.bundle}: JAX {jaxlib_version()} does not read the programs ({error}). The bundle was "
                f"built with JAX {self.manifest.environment.jaxlib}. To export them anew, which needs only both "
                f"config.json: {self.manifest.build_command(self.store.bundle)}"
            ) from error

    def export(self, signature: Signature) -> bytes:
        """Reads the program. Raises CorruptBundle if it is damaged, or its key is not the one in the manifest."""
        entry = self._entries[signature.label]
        remedy = self.manifest.build_command(self.store.bundle)
        try:
            program = self.store.read_program(entry)
        except CorruptBundle as error:
            raise CorruptBundle(f"{error}: {remedy}") from error
        if (
            found := executable_key(
                program, signature, self.manifest.environment, entry.compiler_options
            )
        ) != entry.key:
            raise CorruptBundle(
                f"its key is {found}, but the manifest promises {entry.key}: signature, environment or program differ "
                f"from those that were compiled. Build it again from its checkpoints: {remedy}"
            )
        return program
