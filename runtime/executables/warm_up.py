"""First calls of executables and times of rounds, one at a time, for an engine that has nothing else to do."""

import logging

from dflash_aot.cache.errors import DflashError
from dflash_aot.runtime.executables.executable import DeviceState, Executable
from dflash_aot.runtime.executables.execution_plan import list_round_shapes
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle, warm_up_executable
from dflash_aot.runtime.speculation.controller import AdaptiveK, SpeculationController
from dflash_aot.runtime.speculation.round_timing import RoundTimer

logger = logging.getLogger(__name__)
TIMING_PASSES = 3  # of which the least counts


class WarmUp:
    """What `Engine.open` leaves out when it does not preload. The engine's thread calls it while no slot is active."""

    def __init__(self, bundle: LoadedBundle, state: DeviceState, depth: SpeculationController):
        self._bundle, self._state = bundle, state
        self._depth = depth if isinstance(depth, AdaptiveK) else None
        self._rounds = RoundTimer(bundle, state)
        manifest = bundle.manifest
        self._kinds = list_round_shapes(manifest.grid, manifest.sampling, bundle.k) if self._depth else []
        self._broken: set[Executable] = set()

    def step(self) -> bool:
        """One call, or the times of one kind of round. False where there is nothing to do before more is loaded."""
        for executable in self._bundle.executables:
            if not executable.called and executable not in self._broken:
                self._call(executable)
                return True
        return self._depth is not None and self._time(self._depth)

    def _call(self, executable: Executable) -> None:
        """What fails is left to those who need it: they are told."""
        try:
            warm_up_executable(executable, self._state)
        except (DflashError, RuntimeError) as error:
            logger.error(error)
            self._broken.add(executable)
            self._state.reset()

    def _time(self, depth: AdaptiveK) -> bool:
        self._kinds = [kind for kind in self._kinds if not depth.is_measured(kind)]
        for kind in self._kinds:
            if self._bundle.has_run(*kind, alone=False):
                depth.measure(kind, min(self._rounds.time(*kind) for _ in range(TIMING_PASSES)))
                self._rounds.clear()
                return True
        return False
