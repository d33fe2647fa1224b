"""Groups of hosts that serve one bundle: roles, the leader's and the followers' connections, and their end.

Every host runs the same command. Rank 0 leads; the others connect to it and repeat its device calls, see
`command_stream`. JAX's coordination service tells followers where the leader listens, and a random token without which
nobody is let in. The stream is not encrypted, as JAX's own connections are not: it belongs into a private network.

A group fails as a whole. A process that cannot go on ends with `HostFailed`'s exit code, and all others notice: by the
closed connection, or by TCP's keepalive where a host vanishes.
"""

import hmac
import logging
import os
import queue
import secrets
import select
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
    CommandStream,
    Frame,
    receive_message,
    send_message,
)

logger = logging.getLogger(__name__)
COORDINATOR_PORT = 8484  # of rank 0, where the environment names hosts only
HEARTBEAT_SECONDS = 30  # after which JAX aborts the processes of a group with a dead process
JOIN_SECONDS = 600  # in which all hosts have to start
LOAD_SECONDS = 3600  # in which all hosts have to load
HELLO_SECONDS = 10.0  # in which whoever connects has to say who it is
MAX_HELLO_BYTES = 4096
MAX_REASON = 2000  # characters of another host's error
POLL_SECONDS = 1.0
END_SECONDS = 10.0  # for the followers' end, after the leader's
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
    """What a follower tells later: that it has loaded everything, or why it ends.

    Attributes:
        weights: the fingerprint of its weights.
        failure: "" while it goes on.
    """

    weights: str = ""
    failure: str = ""


# -- groups


@dataclass
class HostGroup:
    """The group that this process has joined.

    Attributes:
        role: of this process.
        failure: why the group failed; None while it serves.
    """

    role: HostRole
    failure: str | None = None


class LeaderGroup(HostGroup):
    """The leader's connections to all followers, by rank.

    Attributes:
        stream: of commands to them.
        is_stuck: whether this host has waited for too long.
        on_failure: is called with the reason, in another thread than the engine's. Ends the process at first.
    """

    def __init__(self, role: HostRole, links: Sequence[socket.socket]):
        super().__init__(role)
        self._links = links
        self._ending = threading.Event()
        self.stream = CommandStream(links)
        self.is_stuck: Callable[[], bool] = lambda: False
        self.on_failure: Callable[[str], None] = lambda _: os._exit(HostFailed.exit_code)

    def wait_until_loaded(self, weights: str) -> None:
        """Waits for all followers. Raises HostFailed, and IncompatibleBundle where one has other weights."""
        for rank, link in enumerate(self._links, 1):
            link.settimeout(LOAD_SECONDS)
            status = self._read(link, rank)
            link.settimeout(None)
            if status.weights != weights:
                raise IncompatibleBundle(
                    f"host {rank} has the weights {status.weights}, the leader {weights}: all hosts need the same "
                    "checkpoints"
                )

    def watch(self) -> None:
        """Starts a thread that waits for a follower's end, and asks `is_stuck` each second."""
        threading.Thread(target=self._watch, name="dflash-hosts", daemon=True).start()

    def _watch(self) -> None:
        while not self._ending.is_set():
            try:
                ready, _, _ = select.select(self._links, [], [], POLL_SECONDS)
            except ValueError:  # closed meanwhile
                return
            if self._ending.is_set():
                return
            try:
                if ready:
                    self._read(ready[0], self._links.index(ready[0]) + 1)
                    raise HostFailed("a host sent what nobody asked for")
                if self.is_stuck():
                    raise HostFailed("no progress for a minute: a host hangs")
            except DflashError as error:
                self.failure = str(error)
                logger.error("the group of hosts failed: %s", error)
                return self.on_failure(str(error))

    def close(self) -> None:
        """Tells the followers to end, and waits for their end for a while; without commands after a failure."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self.failure is None:
            try:
                self.stream.close()
                for link in self._links:
                    link.settimeout(END_SECONDS)
                    link.recv(1)
            except (HostFailed, OSError) as error:
                logger.warning("a host did not end in order: %s", error)
        for link in self._links:
            link.close()

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

    def __init__(self, role: HostRole, link: socket.socket):
        super().__init__(role)
        self._link = link
        self._frames: queue.Queue[Frame] = queue.Queue(WAITING_FRAMES)

    def tell_loaded(self, weights: str) -> None:
        """Raises HostFailed."""
        try:
            send_message(self._link, Status(weights))
        except OSError as error:
            raise HostFailed(f"the leader is gone: {error}") from error

    def start(self) -> None:
        """Starts to read commands."""
        threading.Thread(target=self._read, name="dflash-leader", daemon=True).start()

    def next_frame(self) -> Frame:
        """Waits for the leader's next commands."""
        return self._frames.get()

    def tell_failure(self, error: BaseException) -> None:
        """Tells the leader why this host ends, if it still listens."""
        failure = escape_line(f"{type(error).__name__}: {error}")[:MAX_REASON]
        try:
            send_message(self._link, Status(failure=failure))
        except OSError:
            logger.debug("the leader is gone")

    def _read(self) -> None:
        try:
            while True:
                frame = receive_message(self._link, Frame)
                self._frames.put(frame)
                if frame.is_last:
                    return
        except HostFailed as error:
            # Not an exception: this host's own thread may wait for a device, or for other hosts, for ever.
            logger.error("host %d: the leader is gone: %s", self.role.rank, error)
            os._exit(HostFailed.exit_code)


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
    if jax.process_index() != role.rank:
        raise IncompatibleBundle(
            f"this host's rank is {role.rank}, but its devices are those of process {jax.process_index()}"
        )
    # JAX has no public name for its key-value store.
    store = vars(multihost_utils)["distributed"].global_state.client
    group: HostGroup
    if role.rank == 0:
        with _listen(host) as listener:
            token = secrets.token_hex(16)
            address = StreamAddress(listener.getsockname()[1], token)
            store.key_value_set(STREAM_KEY, msgspec.json.encode(address).decode())
            group = LeaderGroup(role, _accept_hosts(listener, role, manifest, token))
    else:
        try:
            found = store.blocking_key_value_get(STREAM_KEY, JOIN_SECONDS * 1000)
        except RuntimeError as error:  # JAX's
            raise HostFailed(f"the leader does not say where it listens: {error}") from error
        group = FollowerGroup(role, _connect(host, found, role, manifest))
    _joined.append(group)
    return group


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0))
    except OSError as error:
        raise BadInput(
            f"--leader {host}: this host cannot listen there: {error.strerror}"
        ) from error


def _accept_hosts(
    listener: socket.socket, role: HostRole, manifest: Manifest, token: str
) -> list[socket.socket]:
    """The followers' connections by rank. Whoever does not know the token is turned away."""
    links: dict[int, socket.socket] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    while len(links) < role.hosts - 1:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            link, _ = listener.accept()
        except TimeoutError as error:
            raise HostFailed(f"of {role.hosts} hosts, {len(links) + 1} came") from error
        link.settimeout(HELLO_SECONDS)
        try:
            hello = receive_message(link, Hello, MAX_HELLO_BYTES)
        except HostFailed as error:
            logger.warning("turned away at the group's port: %s", error)
            link.close()
            continue
        refusal = _find_refusal(hello, role, manifest, token, links)
        send_message(link, Welcome(refusal))
        if refusal and hmac.compare_digest(hello.token.encode(), token.encode()):
            raise IncompatibleBundle(refusal)
        if refusal:
            link.close()
            continue
        _prepare_link(link)
        links[hello.rank] = link
    return [links[rank] for rank in sorted(links)]


def _find_refusal(
    hello: Hello, role: HostRole, manifest: Manifest, token: str, links: Mapping[int, socket.socket]
) -> str:
    """Why a follower is not let in; "" where it is."""
    if not hmac.compare_digest(hello.token.encode(), token.encode()):
        return "the token is wrong"
    if not 0 < hello.rank < role.hosts or hello.rank in links:
        return f"rank {hello.rank} is taken, or is none of {role.hosts} hosts"
    if hello.manifest != manifest.digest:
        return f"host {hello.rank} has another bundle than the leader: copy the same bundle to all hosts"
    return ""


def _connect(host: str, found: str, role: HostRole, manifest: Manifest) -> socket.socket:
    """A follower's connection, after the leader let it in. Raises HostFailed, IncompatibleBundle."""
    address = msgspec.json.decode(found, type=StreamAddress)
    try:
        link = socket.create_connection((host, address.port), HELLO_SECONDS)
        send_message(link, Hello(address.token, role.rank, manifest.digest))
    except OSError as error:
        raise HostFailed(f"the leader at {host} does not answer: {error}") from error
    welcome = receive_message(link, Welcome, MAX_HELLO_BYTES)
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
