"""The engine loop: schedule → dispatch → commit, one step after the other, on one thread.

The scheduler decides, the dispatcher calls executables, the committer reads their outcomes. Everything that a round
decides stays on the device: a step dispatches the next round before it reads the outcome of the previous one, and
works with upper bounds of the lengths in between.
"""

import logging
import time
from dataclasses import replace

from dflash_aot.cache.errors import CorruptBundle, EngineFailed
from dflash_aot.runtime.committer import Committer, copy_error
from dflash_aot.runtime.dispatcher import Dispatcher
from dflash_aot.runtime.executables.executable import (
    DeviceState,
    has_host_memory,
    has_memory_limit,
    require_host_memory,
)
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle
from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.runtime.scheduler.kv_pages import PoolFull, SlotCopy
from dflash_aot.runtime.scheduler.request_queue import RequestQueue
from dflash_aot.runtime.scheduler.scheduler import (
    LengthBoundTooLoose,
    MixedPlan,
    PackedPlan,
    PrefillPlan,
    RoundPlan,
    Scheduler,
)

logger = logging.getLogger(__name__)
MEMORY_SECONDS = 2.0  # to wait where too little is left for a step
UNLIMITED_SECONDS = 0.1  # between two looks for a memory limit
MAX_FAILURES = 3  # in a row: then the device, or what was loaded on it, is at fault


class EngineLoop:
    """Serves the requests of a queue. One thread calls `step` until the loop is idle."""

    def __init__(
        self,
        bundle: LoadedBundle,
        state: DeviceState,
        counters: Counters,
        queue: RequestQueue,
        scheduler: Scheduler,
        step_bytes: int = 0,
    ):
        """queue: from which the scheduler takes requests.

        step_bytes: host memory that must be left for a step, see `estimate_step_bytes`; 0 is not checked.
        """
        self._queue = queue
        self._scheduler = scheduler
        self._dispatcher = Dispatcher(bundle, state)
        self._committer = Committer(scheduler, counters)
        self._failures = self._successes = 0
        self._max_failures = MAX_FAILURES if state.recovers else 1
        self._step_bytes = step_bytes
        self._unlimited_until = 0.0

    @property
    def is_idle(self) -> bool:
        return self.has_answered and not self._dispatcher.is_offloading

    @property
    def has_answered(self) -> bool:
        """Whether no request waits for an outcome; copies to the host may be on their way."""
        return self._scheduler.is_idle and self._committer.is_idle

    def step(self) -> None:
        """Dispatches at most one prefill chunk and one round, then commits the outcomes of the previous step.

        Raises EngineFailed when programs keep failing; a single failure ends the requests that were in a slot. With
        several hosts there is no second try: others may have run what failed here.
        """
        counters = self._committer.counters
        began = time.perf_counter()
        worked = time.thread_time()
        waited = counters.wait_seconds
        try:
            self._wait_for_memory(began)
            self._schedule()
            self._save_states()
            newest = self._dispatch()
            self._committer.commit(keep=newest)
            self._dispatch_copies()
            self._dispatcher.offload(self._scheduler.kv.plan_offload())
        except Exception as error:  # whatever JAX or the device raises
            self._recover(error)
        counters.host_seconds += time.thread_time() - worked
        counters.host_wall_seconds += time.perf_counter() - began - (counters.wait_seconds - waited)

    def end_all(self, error: str) -> None:
        """Ends every running and waiting request with `error`."""
        committer = self._committer
        with committer.lock:
            committer.drop_in_flight()
            for request in (*self._scheduler.clear_slots(), *self._queue.drain()):
                committer.finish(request, "error", error)
        committer.send_deltas()

    def stats(self) -> Counters:
        """A consistent copy of the counters, for any thread: includes everything that was already sent to a caller."""
        with self._committer.lock:
            copied = self._committer.counters.copy()
            slots = self._scheduler.slots
            copied.running = len(slots)
            copied.slots = slots.count
            copied.waiting = len(self._queue)
            copied.refused = self._queue.refused
            kv = self._scheduler.kv
            copied.prefix_queries = kv.queries
            copied.prefix_hits = kv.hits
            copied.evictions = kv.pool.evictions
            copied.state_evictions = kv.states.evictions
            copied.host_queries = kv.host_queries
            copied.host_hits = kv.host_hits
            copied.host_bytes = kv.host.bytes
            copied.host_evictions = kv.host.evictions
            copied.offloaded_bytes = kv.offloaded_bytes
            copied.restored_bytes = kv.restored_bytes
            copied.pages = kv.pool.count
            copied.pages_used = kv.pool.used
        return copied

    def reset_state(self) -> None:
        """Empties the device state, and forgets the kv pages that it held. No request may hold a slot."""
        self._scheduler.kv.clear()
        self._dispatcher.reset()

    def release(self) -> None:
        """Frees the device state, and copies of it; `step` must not be called any more."""
        self._scheduler.kv.host.clear()
        self._dispatcher.release()

    # -- schedule

    def _schedule(self) -> None:
        """Drops ended requests, gives free slots to waiting requests, and keeps the occupied slots together."""
        scheduler = self._scheduler
        committer = self._committer
        with committer.lock:
            for request, reason in scheduler.drop_ended(time.monotonic()):
                committer.finish(request, "cancelled", reason or None)
            for request in scheduler.fill_slots():
                if request.progress.started is None:
                    request.progress.started = time.monotonic()
                    committer.counters.note_start(request)
            moves = scheduler.compact()
            committer.counters.moves += len(moves)
        committer.send_deltas()
        self._dispatch_copies()
        for source, destination in moves:
            self._dispatcher.move(SlotCopy(source, destination))

    def _save_states(self) -> None:
        """Saves the states of answers that have grown. Commits first: only then the host knows the device's lengths."""
        if not self._scheduler.has_states_to_save:
            return
        self._committer.commit()
        with self._committer.lock:
            self._scheduler.save_states()
        self._dispatch_copies()

    # -- dispatch: each returns how many outcomes it put in flight

    def _dispatch_copies(self) -> None:
        """Dispatches the copies that were planned, before another call changes, or reads, what they copy."""
        for copy in self._scheduler.take_copies():
            if isinstance(copy, SlotCopy):
                self._dispatcher.move(copy)
            else:
                self._dispatcher.restore(copy)

    def _dispatch(self) -> int:
        """Dispatches the next chunk and the next round: in one call where the bundle has such calls."""
        chunk = self._scheduler.plan_prefill()
        self._dispatch_copies()
        if chunk is None:
            return self._dispatch_round()
        if packed := self._scheduler.plan_packed(chunk):
            return self._dispatch_packed(packed) + self._dispatch_round()
        if self._scheduler.can_mix(chunk):
            plan = self._plan_next_round(chunk)
            if mixed := self._scheduler.plan_mixed(chunk, plan):
                return self._dispatch_mixed(mixed)
            if not self._scheduler.holds(chunk.running):  # preempted, to make room for the round
                return self._start_round(plan) if plan else 0
        return self._dispatch_prefill(chunk) + self._dispatch_round()

    def _dispatch_prefill(self, plan: PrefillPlan) -> int:
        if not self._dispatcher.has_run_prefill(plan):
            self._committer.commit()  # a first call takes a while: callers get finished outcomes before it
            self._dispatch_copies()  # of requests that have just ended
        in_flight = self._dispatcher.prefill(plan)
        self._scheduler.start_prefill(plan)
        self._committer.add_prefill(plan, in_flight)
        return 1 if in_flight else 0

    def _dispatch_packed(self, plan: PackedPlan) -> int:
        if not self._dispatcher.has_run_packed(plan):
            self._committer.commit()  # as before the first call of a chunk
        in_flight = self._dispatcher.prefill_packed(plan)
        for chunk in plan.chunks:
            self._scheduler.start_prefill(chunk)
        self._committer.add_packed(plan, in_flight)
        return sum(one is not None for one in in_flight)

    def _dispatch_mixed(self, mixed: MixedPlan) -> int:
        mixed = replace(mixed, round=self._scheduler.start_round(mixed.round))
        in_flight, round_in_flight = self._dispatcher.run_mixed(mixed)
        self._scheduler.start_prefill(mixed.chunk)
        self._committer.counters.wait_seconds += round_in_flight.waited
        self._committer.add_prefill(mixed.chunk, in_flight, mixed_width=mixed.sizes[-1])
        self._committer.add_round(round_in_flight)
        return 2 if in_flight else 1

    def _dispatch_round(self) -> int:
        plan = self._plan_next_round()
        return self._start_round(plan) if plan else 0

    def _start_round(self, plan: RoundPlan) -> int:
        plan = self._scheduler.start_round(plan)
        self._dispatch_copies()
        in_flight = self._dispatcher.run_round(plan)
        self._committer.counters.wait_seconds += in_flight.waited
        self._committer.add_round(in_flight)
        return 1

    def _plan_next_round(self, chunk: PrefillPlan | None = None) -> RoundPlan | None:
        """The next round, see `_plan_round`."""
        plan = self._plan_round(chunk)
        # The masks of a constrained round follow the tokens that are committed.
        if plan and plan.batch.mode == "constrain":
            self._committer.commit()
            plan = self._plan_round(chunk)
        return plan

    def _plan_round(self, chunk: PrefillPlan | None) -> RoundPlan | None:
        """The next round. Commits first if no bucket or too few pages are certain to fit, and before first calls.

        chunk: that the same call is to prefill.
        """
        try:
            plan = self._scheduler.plan_round()
            if plan is None or self._has_run(plan, chunk):
                return plan
        except (LengthBoundTooLoose, PoolFull):
            pass
        committer = self._committer
        committer.commit()
        with committer.lock:
            preempted, plan = self._scheduler.make_room()
            committer.counters.preemptions += len(preempted)
        return plan

    def _has_run(self, plan: RoundPlan, chunk: PrefillPlan | None) -> bool:
        if chunk and (mixed := self._scheduler.plan_mixed(chunk, plan)):
            return self._dispatcher.has_run_mixed(mixed)
        return self._dispatcher.has_run_round(plan)

    # -- faults

    def _wait_for_memory(self, now: float) -> None:
        """Raises MemoryError where the limit of the process leaves too little memory for a step for too long.

        A limit may be set while the process runs, so it is looked up again from time to time, and while no slot is
        taken.
        """
        if not self._step_bytes or (now < self._unlimited_until and self._scheduler.slots):
            return
        if not has_memory_limit():
            self._unlimited_until = now + UNLIMITED_SECONDS
            return
        if has_host_memory(self._step_bytes):
            return
        self._committer.commit()  # callers get what is there already, and its memory is freed
        require_host_memory(self._step_bytes, MEMORY_SECONDS)

    def _recover(self, error: Exception) -> None:
        """Ends the running requests with the error and starts from an empty state; waiting requests lose nothing.

        A corrupt executable is not a device failure, so it does not count towards the limit.
        """
        committer = self._committer
        if committer.successes > self._successes:
            self._failures = 0
            self._successes = committer.successes
        self._failures += self._max_failures == 1 or not isinstance(error, CorruptBundle)
        message = f"the engine step failed: {type(error).__name__}: {error}"
        logger.error(message)
        logger.debug("where it failed", exc_info=error)
        with committer.lock:
            committer.counters.failures += 1
            committer.drop_in_flight()
            for request in self._scheduler.clear_slots():
                request.output.cause = copy_error(error)
                committer.finish(request, "error", message)
        committer.send_deltas()
        if self._failures >= self._max_failures:
            raise EngineFailed(
                f"{self._failures} engine steps failed in a row; the last error: {message}"
            ) from error
        self.reset_state()
