"""A connection to Ray: functions of ours, each called in a process of its own, somewhere in a cluster."""

import importlib.util
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any

from dflash_aot.cache.errors import BadInput, BuildFailed

OWN = "local"  # as Ray says it: one that is started here, and ends with this process
ANY = "auto"  # likewise: the one that this machine belongs to
REACHED_WITHIN = 10  # seconds
TRIES = 3  # processes that may die of one call
OBJECT_BYTES = 256 << 20  # of memory for what is on its way; executables take some MB
TOKEN = "Where the cluster asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to its file"
LOGS = "Ray's logs are on its node, by default in /tmp/ray/session_latest/logs"


class Cluster:
    """Leaving the context of `connect` cancels what is not done; nothing is called any more."""

    def __init__(self, ray: ModuleType, address: str):
        self.address, self.cpus = address, max(1, int(ray.cluster_resources().get("CPU", 0)))
        self._ray = ray
        self._lock = threading.Lock()  # of what follows
        self._left = False
        self._pending: set[Any] = set()

    def call(self, function: Callable[..., Any], *arguments: str | bytes) -> Any:
        """What a function that a module of ours holds returns, from a process that has run nothing else.

        Arguments and result are text and bytes. Raises BuildFailed where no process could end it.
        """
        task = self._ray.remote(max_calls=1, max_retries=TRIES - 1, num_cpus=1)(function)
        with self._lock:
            if self._left:
                raise BuildFailed("the build was left")
            reference = task.remote(*arguments)
            self._pending.add(reference)
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise BuildFailed(self._explain(error)) from error
        finally:
            with self._lock:
                self._pending.discard(reference)

    def cancel(self) -> None:
        """Ends the processes of all calls, which raise BuildFailed."""
        with self._lock:
            self._left, pending = True, list(self._pending)
        for reference in pending:
            self._ray.cancel(reference, force=True)

    def _explain(self, error: Exception) -> str:
        kinds = self._ray.exceptions
        if isinstance(error, kinds.OutOfMemoryError):
            return f"Ray ended its process, for memory on its node was short: fewer --jobs take less. {LOGS}"
        if isinstance(error, kinds.WorkerCrashedError | kinds.NodeDiedError):
            return f"{TRIES} processes died of it, one after the other: the compiler, or the memory of a node. {LOGS}"
        if isinstance(error, kinds.RayTaskError):
            last = str(error.cause).strip().splitlines()[-1:]
            return f"a node of the cluster could not begin: {''.join(last)}. All need the same dflash-aot[ray]"
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


@contextmanager
def connect(address: str, variables: Mapping[str, str]) -> Iterator[Cluster]:
    """To a cluster, or to one of our own; its processes get these environment variables. Raises BadInput.

    What Ray prints goes nowhere: it writes of every process that dies, and to standard output, where reports go.
    """
    _check_reachable(address)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        ray = _import_ray(address)
        _start(ray, address, variables)
        cluster = Cluster(ray, address)
        try:
            yield cluster
        finally:
            cluster.cancel()
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for ten minutes. Raises BadInput."""
    if address in (OWN, ANY):
        return
    if "://" in address:
        raise BadInput(f"--ray_address {address}: Ray's client is not supported. Run this on a node, with host:port")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise BadInput(f"--ray_address {address}: give host:port of the cluster's head, {ANY} or {OWN}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHED_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise BadInput(f"--executor ray: no connection to {address}: {error}. `ray status` tells what runs") from error


def _import_ray(address: str) -> ModuleType:
    """Raises BadInput where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise BadInput('Ray is not installed: pip install "dflash-aot[ray]"')
    os.environ.setdefault("RAY_task_oom_retries", str(TRIES - 1))  # by default it would try for ever, and say nothing
    if address == OWN:
        # Read when Ray is imported, and the only way to have all its ports on loopback: a local `_node_ip_address` is
        # replaced by that of the network.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    else:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")  # of 20, each with a warning on the terminal
    import ray  # noqa: PLC0415  an extra, which takes a second to load

    return ray


def _start(ray: ModuleType, address: str, variables: Mapping[str, str]) -> None:
    own = {"include_dashboard": False, "object_store_memory": OBJECT_BYTES} if address == OWN else {}
    before = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # JAX's: these children start programs at once
            ray.init(
                address=address,
                runtime_env={"env_vars": dict(variables)},
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                **own,
            )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        words = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BadInput(f"--executor ray: no connection to {address}: {words}. {TOKEN}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray sets one of its own
