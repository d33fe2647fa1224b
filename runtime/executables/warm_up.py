"""Warm-up of an engine that was opened without preload: first calls and round times, one step at a time while idle."""

import logging
from collections.abc import Callable

from dflash_aot.cache.errors import DflashError
from dflash_aot.runtime.executables.executable import DeviceState, Executable
from dflash_aot.runtime.executables.host_memory import estimate_step_bytes, has_host_memory
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle, warm_up_executable
from dflash_aot.runtime.executables.required_executables import list_round_shapes
from dflash_aot.runtime.speculation.adaptive_k import AdaptiveK
from dflash_aot.runtime.speculation.controller import SpeculationController
from dflash_aot.runtime.speculation.round_timing import MAX_PASSES, RoundTimer

logger = logging.getLogger(__name__)
FAILURES = (DflashError, MemoryError, RuntimeError)  # RuntimeError: JAX's errors are such


class WarmUp:
    """Does what `Engine.open` skips without `preload`. The engine's thread calls `step` while no slot is active."""

    def __init__(
        self, bundle: LoadedBundle, state: DeviceState, controller: SpeculationController, reset: Callable[[], None]
    ):
        """reset: empties the device state after a failed call, and forgets which kv pages it held."""
        self._bundle, self._state, self._reset = bundle, state, reset
        self._controller = controller if isinstance(controller, AdaptiveK) else None
        self._timer = RoundTimer(bundle, state)
        self._step_bytes = estimate_step_bytes(bundle.manifest)
        manifest = bundle.manifest
        shapes = list_round_shapes(manifest.grid, manifest.sampling, bundle.k)
        untimed = [one for one in shapes if self._controller and not self._controller.costs.is_measured(one)]
        # Pass by pass, so that a moment's disturbance of the machine hits few timings of one shape.
        self._untimed = untimed * MAX_PASSES
        self._broken: set[Executable] = set()

    def step(self) -> bool:
        """Calls one executable, or times one round shape. Returns False if nothing is left to do for now."""
        if not has_host_memory(self._step_bytes):
            return False
        for executable in self._bundle.executables.list_loaded():
            if not executable.called and executable not in self._broken:
                self._call(executable)
                return True
        if self._controller is None or not self._bundle.executables.has_ended:
            return False  # while the loader's thread works, rounds take up to twice as long
        return self._time_round(self._controller)

    def _call(self, executable: Executable) -> None:
        """An error is only logged: a request that needs the executable gets the error."""
        try:
            warm_up_executable(executable, self._state)
        except FAILURES as error:
            logger.error(error)
            self._broken.add(executable)
            self._reset()

    def _time_round(self, controller: AdaptiveK) -> bool:
        """Times one round of the next shape of which all executables were called. Returns False if there is none."""
        self._untimed = [shape for shape in self._untimed if not controller.costs.is_served(shape)]
        for index, shape in enumerate(self._untimed):
            if self._bundle.has_run(shape, multi_round=False):
                del self._untimed[index]
                try:
                    controller.costs.set_measured(shape, self._timer.time(*shape))
                    self._timer.clear()
                except FAILURES as error:  # served rounds will tell how long they take
                    logger.error("a round was not timed: %s", error)
                    self._reset()
                return True
        return False
