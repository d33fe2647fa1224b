"""Server lifecycle: listens, opens the engine in a thread while /health answers, serves, drains, exits."""

import asyncio
import logging
import os
import signal
import socket
import threading
from pathlib import Path
from types import FrameType

import uvicorn

from dflash_aot.cache.errors import BadInput, EngineFailed
from dflash_aot.server.app import create_app
from dflash_aot.server.connection import make_protocol
from dflash_aot.server.served_model import ServerState

logger = logging.getLogger(__name__)
# Connections that may be accepted at once, before the limit of connections counts them.
BACKLOG = 128
INTERRUPTED = 130  # the exit code that shells report after SIGINT
# After draining: to send the last responses, and for the engine's thread to end.
GRACE_SECONDS = 5.0


class LifecycleObserver:
    """Callbacks for the start of a server; these do nothing."""

    def on_listening(self) -> None:
        """Connections are accepted; nothing is opened yet."""

    def on_phase(self, phase: str) -> None:
        """A phase of opening the model begins. Called in another thread."""

    def on_ready(self) -> None:
        """Requests are served. Called in another thread."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises BadInput for an address that cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # from now on connections wait instead of being refused
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(
            f"cannot listen at {host}, port {port}: {reason}. Use another address: --host, --port"
        ) from error
    return listener


def serve(
    state: ServerState,
    listener: socket.socket,
    hosts: frozenset[str] | None,
    tls: tuple[Path, Path] | None = None,
    observer: LifecycleObserver | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, and until open requests are answered or `drain_seconds` have passed.

    listener: see `listen`. hosts: see `RequestMiddleware`. tls: files of the certificate chain and its private key.
    Raises what `Engine.open` raises, and EngineFailed for an engine that fails while it serves.
    """
    config = uvicorn.Config(
        create_app(state, hosts),
        http=make_protocol(state.limits),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(state.limits.drain_seconds + GRACE_SECONDS),
        ssl_certfile=str(tls[0]) if tls else None,
        ssl_keyfile=str(tls[1]) if tls else None,
    )
    observer = observer or LifecycleObserver()
    server = _Server(config, state, observer)
    # While uvicorn runs, it has its own handler, and raises the signal again at its end.
    previous = signal.signal(signal.SIGTERM, server.on_sigterm)
    try:
        observer.on_listening()
        server.run([listener])
    finally:
        signal.signal(signal.SIGTERM, previous)
    if server.failure:
        raise server.failure
    if server.is_opening:  # XLA's thread cannot be stopped
        logger.warning("stopped while the bundle was opened")
        os._exit(0)


class _Server(uvicorn.Server):
    """uvicorn's server, which opens the model after its start and closes the engine at its shutdown."""

    def __init__(self, config: uvicorn.Config, state: ServerState, observer: LifecycleObserver):
        super().__init__(config)
        self._state = state
        self._observer = observer
        self.failure: BaseException | None = None
        self._opening = threading.Thread(target=self._open, name="dflash-opening", daemon=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._opening.start()

    def on_sigterm(self, _: int, __: FrameType | None) -> None:
        """Handles SIGTERM before and after uvicorn's own handler is installed."""
        self.should_exit = True

    @property
    def is_opening(self) -> bool:
        return self._opening.is_alive()

    def _open(self) -> None:
        try:
            self._state.open(self._observer.on_phase)
        except BaseException as error:
            self.failure = error
            self.should_exit = True
            return
        self._observer.on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. A failed engine ends the server, so that a supervisor can restart the process."""
        if counter % 10 == 0 and (reason := self._state.failure):
            self.failure = EngineFailed(f"the engine has failed: {reason}")
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.drain()
        if self._state.opened is None:
            await super().shutdown(sockets)
            return
        closing = threading.Thread(target=self._state.close, name="dflash-closing", daemon=True)
        closing.start()
        stopping = asyncio.create_task(super().shutdown(sockets))
        while not (stopping.done() or self.force_exit):
            await asyncio.wait([stopping], timeout=0.1)
        if self.force_exit:  # a second Ctrl-C; uvicorn waits on until the connections are closed
            logger.warning("stopped at once: open requests are cut off")
            os._exit(INTERRUPTED)
        await stopping
        await asyncio.to_thread(closing.join, self._state.limits.drain_seconds + GRACE_SECONDS)
        if closing.is_alive():
            logger.error("the device does not answer: the process exits without closing the engine")
            os._exit(1)
