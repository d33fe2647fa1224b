"""Groups of hosts that serve one bundle: roles, the leader's and the followers' connections, and their end.

Every host runs the same command. Rank 0 leads; the others connect to it and repeat its device calls, see
`command_stream`. JAX's coordination service tells followers where the leader listens, and the random token that every
connection needs. Like JAX's own connections the stream is not encrypted: it belongs into a private network.

A group fails as a whole. A process that cannot go on ends with `HostFailed`'s exit code, and all others notice: by the
closed connection, or by TCP's keepalive where a host vanishes.
"""

import hmac
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import msgspec
from jax.experimental import multihost_utils

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.errors import BadInput, DflashError, HostFailed, IncompatibleBundle
from dflash_aot.cache.printable import escape_line
from dflash_aot.runtime.command_stream import (
    ALIVE_FRAME,
    CommandStream,
    Frame,
    receive_message,
    send_message,
)
from dflash_aot.runtime.metrics.counters import STALL_SECONDS

logger = logging.getLogger(__name__)
COORDINATOR_PORT = 8484  # of rank 0, where the environment names hosts only
JOIN_SECONDS = 600  # in which all hosts have to start
# In which the followers connect, once JAX knows that all hosts have started. Less than half of HEARTBEAT_SECONDS, so
# that a host that died meanwhile ends the group by our error, not by JAX's abort.
MEET_SECONDS = STALL_SECONDS
LOAD_SECONDS = 3600  # in which all hosts have to load
HELLO_SECONDS = 10.0  # for a new connection to send its rank and token
MAX_HELLO_BYTES = 4096
MAX_REASON = 2000  # characters of another host's error
POLL_SECONDS = 1.0
ALIVE_SECONDS = 10.0  # between two messages that only say that a host is alive
END_SECONDS = 10.0  # for the followers' end, after the leader's
FIRST_CALL_SECONDS = (
    600.0  # without a frame, while the leader calls each executable for the first time
)
ANSWER_SECONDS = (
    15.0  # for callers to read their errors, before JAX aborts a group with a dead process
)
# JAX aborts all processes of a group with a silent host after half of this time at the earliest, and no caller gets an
# answer. So it is longer than this module takes to notice such a host.
HEARTBEAT_SECONDS = 2 * int(STALL_SECONDS + ANSWER_SECONDS + 15)
WAITING_FRAMES = 256  # received and not yet played
STREAM_KEY = "dflash_aot/stream"
# TCP looks after a silent host after 10 s, every 5 s, and gives it up after 30 s.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class HostRole(msgspec.Struct, frozen=True):
    """The part of this process in a group.

    Attributes:
        hosts: number of processes, one for each host.
        rank: of this process; 0 leads.
        leader: HOST:PORT of JAX's coordination service, in the process of rank 0.
    """

    hosts: int
    rank: int
    leader: str


def read_role(environment: Mapping[str, str]) -> HostRole | None:
    """The role that a TPU slice's environment names; None where it names no second host. Raises BadInput."""
    names = [name for name in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    if len(names) < 2:
        return None
    rank = environment.get("TPU_WORKER_ID", "")
    if not (rank.isascii() and rank.isdigit() and int(rank) < len(names)):
        raise BadInput(
            f"TPU_WORKER_ID is {rank!r}, and TPU_WORKER_HOSTNAMES names {len(names)} hosts: a number below is needed"
        )
    return HostRole(len(names), int(rank), f"{names[0]}:{COORDINATOR_PORT}")


# -- what hosts tell each other when they meet


class StreamAddress(msgspec.Struct, frozen=True):
    """Where the leader listens, and the token of its group."""

    port: int
    token: str


class Hello(msgspec.Struct, frozen=True):
    """A follower's first message: the group's token, its rank, and the digest of its bundle's manifest."""

    token: str
    rank: int
    manifest: str


class Welcome(msgspec.Struct, frozen=True):
    """The leader's answer; "" accepts."""

    refusal: str = ""


class Status(msgspec.Struct, frozen=True):
    """What a follower tells later: that it has loaded everything, why it ends, or only that it is alive.

    Attributes:
        weights: the fingerprint of its weights.
        failure: "" while it goes on.
    """

    weights: str = ""
    failure: str = ""


ALIVE = Status()


# -- groups


@dataclass
class HostGroup:
    """The group that this process has joined.

    Attributes:
        role: of this process.
        manifest: the digest of the manifest that all hosts have.
        failure: why the group failed; None while it serves.
    """

    role: HostRole
    manifest: str
    failure: str | None = None

    def check_bundle(self, manifest: Manifest) -> None:
        """Raises IncompatibleBundle for another bundle than the one that the hosts have agreed on."""
        if manifest.digest != self.manifest:
            raise IncompatibleBundle(
                f"the hosts have joined for the bundle {self.manifest}, and {manifest.digest} is opened: start all "
                "hosts again with this bundle"
            )


class LeaderGroup(HostGroup):
    """The leader's connections to all followers, by rank.

    Attributes:
        stream: of commands to them.
        is_stuck: whether this host has waited for too long. At first: whether it calls nothing.
        on_failure: is called with the reason, in another thread than the engine's.
        end_process: ends the process; at first at once, else some time after `on_failure`.
    """

    def __init__(self, role: HostRole, manifest: str, links: Sequence[socket.socket]):
        super().__init__(role, manifest)
        self._links = links
        self._reading = threading.RLock()  # garbage collection may close within
        self._ending = threading.Event()
        self._is_serving = False
        self._selector = selectors.DefaultSelector()
        for rank, link in enumerate(links, 1):
            link.settimeout(STALL_SECONDS)  # for each frame
            self._selector.register(link, selectors.EVENT_READ, rank)
        self._last_frame = 0, time.monotonic()
        self._heard: dict[int, float] = {}
        self.stream = CommandStream(links)
        self.is_stuck: Callable[[], bool] = self._is_silent
        self.end_process: Callable[[], None] = lambda: os._exit(HostFailed.exit_code)
        self.on_failure: Callable[[str], None] = lambda _: self.end_process()

    def check_bundle(self, manifest: Manifest) -> None:
        """As the base class. Raises BadInput where the group has had its engine."""
        super().check_bundle(manifest)
        if self._is_serving:
            raise BadInput(
                "a group of hosts serves one engine, and had it: start all hosts again for another"
            )

    def wait_until_loaded(self, weights: str) -> None:
        """Waits for all followers. Raises HostFailed, and IncompatibleBundle where one has other weights."""
        self._is_serving = True
        deadline = time.monotonic() + LOAD_SECONDS
        waiting = {*range(1, self.role.hosts)}
        while waiting:
            found = self._next_status(max(0.0, deadline - time.monotonic()))
            if found is None:
                raise HostFailed(
                    f"hosts {sorted(waiting)} have not loaded the bundle in {LOAD_SECONDS} s: see their logs"
                )
            rank, status = found
            if status.weights != weights:
                raise IncompatibleBundle(
                    f"host {rank} has the weights {status.weights}, the leader {weights}: all hosts need the same "
                    "checkpoints"
                )
            waiting.discard(rank)

    def watch(self) -> None:
        """Starts a thread that waits for a follower's end or silence, and asks `is_stuck` each second."""
        self._last_frame = self.stream.frames, time.monotonic()
        self._heard = dict.fromkeys(range(1, self.role.hosts), time.monotonic())
        threading.Thread(target=self._watch, name="dflash-hosts", daemon=True).start()

    def _watch(self) -> None:
        try:
            while self.failure is None and not self._ending.is_set():
                self._check()
        except (DflashError, OSError) as error:
            if not self._ending.is_set():
                self._fail(str(error))
        finally:
            if self.failure is not None:
                time.sleep(
                    ANSWER_SECONDS
                )  # a program that waits for standard input ends by nothing else
                self.end_process()

    def _fail(self, reason: str) -> None:
        self.failure = reason
        logger.error("the group of hosts failed: %s", reason)
        self.on_failure(reason)

    def _check(self) -> None:
        found = self._next_status(POLL_SECONDS)
        if self._ending.is_set():
            return
        if found:
            raise HostFailed(f"host {found[0]} sent an unexpected message")
        self.stream.send_alive(ALIVE_SECONDS)
        for rank, heard in self._heard.items():
            if time.monotonic() - heard > STALL_SECONDS:
                raise HostFailed(f"host {rank} has said nothing for {STALL_SECONDS:.0f} s")
        if self.is_stuck():
            raise HostFailed("no progress for a minute: a host hangs")

    def _is_silent(self) -> bool:
        """Whether no frame was sent for long."""
        frames, since = self._last_frame
        now = time.monotonic()
        if frames != self.stream.frames:
            self._last_frame = self.stream.frames, now
        return frames == self.stream.frames and now - since > FIRST_CALL_SECONDS

    def close(self) -> None:
        """Tells the followers to end, and waits for their end for a while; without commands after a failure."""
        with self._reading:
            if self._ending.is_set():
                return
            self._ending.set()
        if self.failure is None:
            try:
                self.stream.close()
                for rank, link in enumerate(self._links, 1):
                    self._wait_for_end(rank, link)
            except (DflashError, OSError, RuntimeError) as error:  # RuntimeError: JAX's
                logger.error("the hosts did not end in order: %s", error)
                self.failure = str(error)
        for link in self._links:
            link.close()

    def _wait_for_end(self, rank: int, link: socket.socket) -> None:
        deadline = time.monotonic() + END_SECONDS
        while True:
            link.settimeout(max(0.001, deadline - time.monotonic()))
            if not link.recv(1, socket.MSG_PEEK):
                return
            if self._read(link, rank) != ALIVE:
                raise HostFailed(f"host {rank} sent an unexpected message")

    def _next_status(self, seconds: float) -> tuple[int, Status] | None:
        """The next message of any follower that says more than ALIVE, and its rank; None where none comes in time.

        Raises HostFailed.
        """
        deadline = time.monotonic() + seconds
        while ready := self._selector.select(max(0.0, deadline - time.monotonic())):
            key, _ = ready[0]
            assert isinstance(key.fileobj, socket.socket)
            with self._reading:
                if self._ending.is_set():
                    return None  # from now on `close` reads
                status = self._read(key.fileobj, key.data)
            self._heard[key.data] = time.monotonic()
            if status != ALIVE:
                return key.data, status
        return None

    def _read(self, link: socket.socket, rank: int) -> Status:
        try:
            status = receive_message(link, Status, MAX_HELLO_BYTES * 4)
        except HostFailed as error:
            raise HostFailed(f"host {rank}: {error}") from error
        if status.failure:
            raise HostFailed(f"host {rank} failed: {status.failure}")
        return status


class FollowerGroup(HostGroup):
    """A follower's connection to the leader. A thread reads it, so that the leader's end is seen during a call."""

    def __init__(self, role: HostRole, manifest: str, link: socket.socket):
        super().__init__(role, manifest)
        self._link = link
        self._sending = threading.Lock()
        self._ended = threading.Event()  # by this host's failure, or in order
        self._frames: queue.Queue[Frame] = queue.Queue(WAITING_FRAMES)
        self.end_process: Callable[[], None] = lambda: os._exit(HostFailed.exit_code)

    def tell_loaded(self, weights: str) -> None:
        """Tells the leader that everything is loaded. Raises HostFailed."""
        try:
            self._tell(Status(weights))
        except OSError as error:
            raise HostFailed(f"the leader is gone: {error}") from error

    def _tell(self, status: Status) -> None:
        with self._sending:
            send_message(self._link, status)

    def _tell_alive(self) -> None:
        while not self._ended.wait(ALIVE_SECONDS):
            try:
                self._tell(ALIVE)
            except OSError:
                return  # the thread that reads has seen why

    def start(self) -> None:
        """Starts to read commands; before loading, which takes minutes, so that the leader's end is seen at once."""
        threading.Thread(target=self._read, name="dflash-leader", daemon=True).start()

    def next_frame(self) -> Frame:
        """Waits for the leader's next commands."""
        return self._frames.get()

    def tell_failure(self, error: BaseException) -> None:
        """Tells the leader why this host ends, if it still listens. From now on the leader's end is expected."""
        self._ended.set()
        failure = escape_line(f"{type(error).__name__}: {error}")[:MAX_REASON]
        try:
            self._tell(Status(failure=failure))
        except OSError:
            logger.debug("the leader is gone")

    def _read(self) -> None:
        try:
            frame = receive_message(self._link, Frame)
            # All have loaded: from now on each says that it is alive.
            self._link.settimeout(STALL_SECONDS)
            threading.Thread(target=self._tell_alive, name="dflash-alive", daemon=True).start()
            while not frame.is_last:
                if frame != ALIVE_FRAME:
                    self._frames.put(frame)
                frame = receive_message(self._link, Frame)
            self._ended.set()
            self._frames.put(frame)
        except HostFailed as error:
            if self._ended.is_set():
                return  # the process ends with the error's own code
            # Not an exception: this host's own thread may wait for a device, or for other hosts, for ever.
            logger.error("host %d: the leader is gone: %s", self.role.rank, error)
            self.end_process()


_joined: list[HostGroup] = []


def find_group() -> HostGroup | None:
    """The group that this process has joined; JAX lets a process join one."""
    return _joined[0] if _joined else None


def join_group(role: HostRole, manifest: Manifest) -> HostGroup:
    """Joins the group of hosts that serves a bundle; before JAX starts. Returns when all hosts are there.

    Raises BadInput for another number of hosts than the bundle's, IncompatibleBundle where a host has another bundle,
    HostFailed where one does not come.
    """
    if manifest.environment.hosts != role.hosts:
        raise BadInput(
            f"the bundle was built for {manifest.environment.hosts} hosts, and {role.hosts} are given: --hosts"
        )
    host, _, port = role.leader.rpartition(":")
    host = host.strip("[]")  # around an IPv6 address
    if not (host and port.isascii() and port.isdigit()):
        raise BadInput(f"--leader {role.leader}: HOST:PORT is needed")
    if manifest.environment.platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if hasattr(jax.config, "jax_enable_preemption_service"):  # which takes SIGTERM from us
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            role.leader,
            num_processes=role.hosts,
            process_id=role.rank,
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise HostFailed(f"the hosts did not meet at {role.leader}: {error}") from error
    digest = manifest.digest
    # JAX has no public name for its key-value store.
    store = vars(multihost_utils)["distributed"].global_state.client
    group: HostGroup
    if role.rank == 0:
        with _listen(host) as listener:
            token = secrets.token_hex(16)
            address = StreamAddress(listener.getsockname()[1], token)
            store.key_value_set(STREAM_KEY, msgspec.json.encode(address).decode())
            group = LeaderGroup(role, digest, accept_followers(listener, role, digest, token))
    else:
        try:
            found = store.blocking_key_value_get(STREAM_KEY, int(MEET_SECONDS * 1000))
        except RuntimeError as error:  # JAX's
            raise HostFailed(f"the leader does not say where it listens: {error}") from error
        group = FollowerGroup(role, digest, connect_to_leader(host, found, role, digest))
    # Starts JAX's backend, which takes as long as the slowest host.
    if jax.process_index() != role.rank:
        raise IncompatibleBundle(
            f"this host's rank is {role.rank}, but its devices are those of process {jax.process_index()}"
        )
    _joined.append(group)
    return group


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise BadInput(
            f"--leader {host}: this host cannot listen there: {error.strerror}"
        ) from error


def accept_followers(
    listener: socket.socket, role: HostRole, manifest: str, token: str
) -> list[socket.socket]:
    """The leader's connections, by rank. Connections without the right token are refused.

    manifest: its digest. Raises HostFailed where a host does not come, IncompatibleBundle where one does not fit.
    """
    links: dict[int, socket.socket] = {}
    deadline = time.monotonic() + MEET_SECONDS
    while len(links) < role.hosts - 1:
        if (link := _accept_until(listener, deadline)) is None:
            missing = sorted({*range(1, role.hosts)} - links.keys())
            raise HostFailed(
                f"hosts {missing} started, but did not connect to this one in {MEET_SECONDS:.0f} s: see their logs"
            )
        try:
            hello = receive_message(link, Hello, MAX_HELLO_BYTES, HELLO_SECONDS)
            is_known = hmac.compare_digest(hello.token.encode(), token.encode())
            refusal = (
                _find_refusal(hello, role, manifest, links) if is_known else "the token is wrong"
            )
            send_message(link, Welcome(refusal))
        except (HostFailed, OSError) as error:
            logger.warning("refused a connection at the group's port: %s", error)
            link.close()
            continue
        if is_known and refusal:
            raise IncompatibleBundle(refusal)
        if refusal:
            logger.warning("refused a connection at the group's port: %s", refusal)
            link.close()
            continue
        _prepare_link(link)
        links[hello.rank] = link
    return [links[rank] for rank in sorted(links)]


def _accept_until(listener: socket.socket, deadline: float) -> socket.socket | None:
    """The next connection; None where none comes in time."""
    listener.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        return listener.accept()[0]
    except TimeoutError:
        return None


def _find_refusal(
    hello: Hello, role: HostRole, manifest: str, links: Mapping[int, socket.socket]
) -> str:
    """Why a follower is refused; "" where it is accepted."""
    if not 0 < hello.rank < role.hosts:
        return (
            f"a host has rank {hello.rank}, and followers have 1 to {role.hosts - 1}: --host_rank"
        )
    if hello.rank in links:
        return f"two hosts have rank {hello.rank}: give each its own --host_rank"
    if hello.manifest != manifest:
        return (
            f"host {hello.rank} has the bundle {hello.manifest}, the leader {manifest}: copy the same bundle to all "
            "hosts"
        )
    return ""


def connect_to_leader(host: str, found: str, role: HostRole, manifest: str) -> socket.socket:
    """A follower's connection, after the leader accepted it. Raises HostFailed, IncompatibleBundle.

    found: a StreamAddress, as JSON. manifest: its digest.
    """
    address = msgspec.json.decode(found, type=StreamAddress)
    try:
        link = socket.create_connection((host, address.port), HELLO_SECONDS)
        send_message(link, Hello(address.token, role.rank, manifest))
    except OSError as error:
        raise HostFailed(f"the leader at {host} does not answer: {error}") from error
    # The leader may be waiting for other followers to send their rank and token.
    welcome = receive_message(link, Welcome, MAX_HELLO_BYTES, MEET_SECONDS)
    if welcome.refusal:
        raise IncompatibleBundle(f"the leader refuses this host: {welcome.refusal[:MAX_REASON]}")
    _prepare_link(link)
    return link


def _prepare_link(link: socket.socket) -> None:
    """Sends at once, waits for ever, and notices where the other host vanishes."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if option := getattr(socket, name, None):  # Linux has all of them
            link.setsockopt(socket.IPPROTO_TCP, option, value)
