"""The server from its start to its end: answers while the engine is opened, and drains before it goes."""

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
from dflash_aot.server.connection import limit_connections
from dflash_aot.server.server_state import Service

logger = logging.getLogger(__name__)
BACKLOG = 128  # so many are accepted at once, before any is counted
INTERRUPTED = 130  # as shells report it
GRACE = 5.0  # seconds, behind the drain: for answers to be sent, and the engine's thread to end


class Observer:
    """Who wants to know how far it is; this one does not."""

    def note_listening(self) -> None:
        """Whoever connects is answered; nothing is opened yet."""

    def note_phase(self, phase: str) -> None:
        """What begins, of what opening takes; from another thread."""

    def note_ready(self) -> None:
        """Requests are served; from another thread."""


def listen(host: str, port: int) -> socket.socket:
    """Raises BadInput for what cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # who comes from now on waits, and is not refused
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"cannot listen at {host}, port {port}: {reason}. Name others: --host, --port") from error
    return listener


def serve(
    service: Service,
    listener: socket.socket,
    hosts: frozenset[str] | None,
    tls: tuple[Path, Path] | None = None,
    observer: Observer | None = None,
) -> None:
    """Until SIGTERM or SIGINT and all that was under way is answered, or the time for it has passed.

    listener: see `listen`. tls: files of the certificate chain and its key.
    Raises what `Engine.open` raises, and EngineFailed for an engine that failed while it served.
    """
    config = uvicorn.Config(
        create_app(service, hosts),
        http=limit_connections(service.limits),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(service.limits.drain_seconds + GRACE),
        ssl_certfile=str(tls[0]) if tls else None,
        ssl_keyfile=str(tls[1]) if tls else None,
    )
    observer = observer or Observer()
    server = _Server(config, service, observer)
    # uvicorn has a handler of its own while it runs, and raises the signal once more when it has done what that says.
    before = signal.signal(signal.SIGTERM, server.note_end)
    try:
        observer.note_listening()
        server.run([listener])
    finally:
        signal.signal(signal.SIGTERM, before)
    if server.failure:
        raise server.failure
    if server.is_opening:  # a thread of XLA's that nobody can stop
        logger.warning("ended while the bundle was opened")
        os._exit(0)


class _Server(uvicorn.Server):
    """uvicorn's, with an engine that lives as long as it."""

    def __init__(self, config: uvicorn.Config, service: Service, observer: Observer):
        super().__init__(config)
        self._service, self._observer = service, observer
        self.failure: BaseException | None = None
        self._opening = threading.Thread(target=self._open, name="dflash-opening", daemon=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._opening.start()

    def note_end(self, _: int, __: FrameType | None) -> None:
        """SIGTERM before it runs, or when it has ended already."""
        self.should_exit = True

    @property
    def is_opening(self) -> bool:
        return self._opening.is_alive()

    def _open(self) -> None:
        try:
            self._service.open(self._observer.note_phase)
        except BaseException as error:
            self.failure, self.should_exit = error, True
            return
        self._observer.note_ready()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second. An engine that has failed serves nobody: whoever restarts processes is to know."""
        if counter % 10 == 0 and (reason := self._service.failure):
            self.failure = EngineFailed(f"the engine has failed: {reason}")
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.draining = True
        if self._service.opened is None:
            await super().shutdown(sockets)
            return
        closing = threading.Thread(target=self._service.close, name="dflash-closing", daemon=True)
        closing.start()
        await super().shutdown(sockets)
        if self.force_exit:  # Ctrl-C once more
            logger.warning("ended at once: what was under way is cut short")
            os._exit(INTERRUPTED)
        await asyncio.to_thread(closing.join, self._service.limits.drain_seconds + GRACE)
        if closing.is_alive():
            logger.error("the device does not answer: the process ends without it")
            os._exit(1)
