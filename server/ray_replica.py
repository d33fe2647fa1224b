"""The server on Ray Serve: replicas that open a bundle each, behind Ray's proxies. Loaded by who has Ray only.

serve run dflash_aot.server.ray_replica:build bundle=s3://bucket/served/qwen3 replicas=2
"""

import gc
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from starlette.types import ASGIApp

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput, EngineFailed
from dflash_aot.cache.remote.fetch import locate_bundle
from dflash_aot.server.api_keys import Keys, make_keys, read_keys
from dflash_aot.server.app import create_app
from dflash_aot.server.limits import Limits
from dflash_aot.server.middleware import LOOPBACK
from dflash_aot.server.served_model import Serving
from dflash_aot.server.server_state import Service

GRACE = 10.0  # seconds, behind the drain: for the engine's thread to end
HEALTH_SECONDS = 5.0  # between checks; Ray replaces a replica after three that fail in a row


class Options(BaseModel):
    """What `serve run` takes as name=value, and a file of `serve build` under `args`.

    bundle: a URL, or a directory that all nodes see. actor: what one replica takes of a node, as Ray says it: one slice
    is `{"resources": {"TPU": 4}}`. api_keys: a file of keys, read where the application is built; without_keys: there
    are to be none. max_waiting: requests in line at each replica behind those in slots; max_queued: at each proxy,
    behind those.
    """

    model_config = ConfigDict(extra="forbid")

    bundle: str
    target: str | None = None
    draft: str | None = None
    k: int | Literal["auto"] = "auto"
    name: str | None = None
    temperature: float | None = None
    require_signature: Path | None = None
    api_keys: Path | None = None
    without_keys: bool = False
    replicas: int = Field(1, ge=1)
    actor: dict[str, Any] = {"num_cpus": 1}
    max_waiting: int = Field(16, ge=1)
    max_queued: int = Field(256, ge=1)
    drain_seconds: float = Field(30.0, ge=0)


class Replica:
    """One engine: Ray's methods of a deployment, around the application that dflash-serve serves."""

    def __init__(self, serving: Serving, limits: Limits, keys: Keys):
        self._service = Service(serving, limits, keys)
        self._service.open()
        gc.freeze()  # of what comes with JAX nothing is ever garbage, and looking through it stalls everything

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Without keys it answers to this machine's own names only."""
        return create_app(self._service, None if self._service.keys else LOOPBACK)

    async def check_health(self) -> None:
        """Raises EngineFailed where a replica had better be replaced."""
        if (status := self._service.status) in ("failed", "stalled"):
            raise EngineFailed(f"the engine has {status}: {self._service.failure or 'its device does not answer'}")

    def stats(self) -> dict[str, Any]:
        """Of whichever replica a handle asks: who it is, and what its engine does."""
        stats = self._service.model.engine.stats()
        return {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "running": stats.running,
            "waiting": stats.waiting,
            "rounds": stats.rounds,
            "compile_events": stats.compile_events,
        }

    def __del__(self) -> None:
        """Called by Ray, which has waited for the requests that it knows of."""
        self._service.close()


def build(options: Options) -> serve.Application:
    """The application that Ray runs.

    Raises what opening a bundle's manifest raises, BadInput for a file of keys that is none.
    """
    signed_by = options.require_signature
    slots = read_manifest(locate_bundle(options.bundle, signed_by), signed_by).grid.batch[-1]
    serving = Serving(
        bundle=options.bundle,
        target=options.target,
        draft=options.draft,
        k=options.k,
        max_waiting=options.max_waiting,
        require_signature=signed_by,
        name=options.name,
        temperature=options.temperature,
    )
    if not (options.api_keys or options.without_keys):
        raise BadInput(
            "whoever reaches Ray's proxy could ask: give api_keys, a file with one a line, or say without_keys=true "
            "where the proxy listens to its own machine alone"
        )
    keys = make_keys(read_keys(options.api_keys), str(options.api_keys)) if options.api_keys else Keys()
    return describe_deployment(options, slots).bind(serving, Limits(drain_seconds=options.drain_seconds), keys)


def describe_deployment(options: Options, slots: int) -> serve.Deployment:
    """A replica takes what fills its slots and its line; Ray keeps the rest, and asks the shorter queue."""
    deploy = serve.deployment(
        name="dflash",
        num_replicas=options.replicas,
        ray_actor_options=options.actor,
        max_ongoing_requests=slots + options.max_waiting,
        max_queued_requests=options.max_queued,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=options.drain_seconds + GRACE,
        max_constructor_retry_count=3,
    )
    return deploy(serve.ingress()(Replica))
