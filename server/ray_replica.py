"""Ray Serve deployment: replicas that open a bundle each and get requests from Ray's proxies.

Imported only where Ray is installed:

serve run dflash_aot.server.ray_replica:build bundle=s3://bucket/served/qwen3 replicas=2 api_keys=keys.txt
"""

import gc
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json
from ray import serve
from starlette.types import ASGIApp

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput, EngineFailed
from dflash_aot.cache.model_config.speculative_config import KChoice, KRanges
from dflash_aot.cache.remote.transfer import locate_bundle
from dflash_aot.server.app import create_app
from dflash_aot.server.limits import ApiKeys, ServerLimits, make_keys, read_keys
from dflash_aot.server.middleware import LOOPBACK
from dflash_aot.server.served_model import ServerState, ServingConfig

GRACE_SECONDS = 10.0  # after draining, for the engine's thread to end
HEALTH_SECONDS = 5.0  # between health checks; Ray replaces a replica after three failures in a row


class Options(BaseModel):
    """Arguments of `serve run` as name=value, or of `serve build` under `args`."""

    model_config = ConfigDict(extra="forbid")

    bundle: str  # a URL, or a directory that all nodes can read
    target: str | None = None
    draft: str | None = None
    k: KChoice | Json[KRanges] = "auto"  # ranges as JSON: k=[[1,4,7],[5,8,0]]
    name: str | None = None
    temperature: float | None = None
    require_signature: Path | None = None
    prefix_caching: bool = True
    prefix_salt: Literal["key", "none"] = "key"
    api_keys: Path | None = None  # a file of keys, read where the application is built
    without_keys: bool = False  # confirms that no keys are wanted
    replicas: int = Field(1, ge=1)
    # Ray's resources of a replica; a TPU slice: {"resources": {"TPU": 4}}.
    actor: dict[str, Any] = {"num_cpus": 1}
    max_waiting: int = Field(16, ge=1)  # requests in the queue of each replica
    max_queued: int = Field(256, ge=1)  # requests that wait at each proxy in addition
    drain_seconds: float = Field(30.0, ge=0)


class Replica:
    """One engine with the application of dflash-serve, and the methods that Ray calls on a deployment."""

    def __init__(self, config: ServingConfig, limits: ServerLimits, keys: ApiKeys):
        self._state = ServerState(config, limits, keys)
        self._state.open()
        gc.freeze()  # JAX's objects are never garbage, and each full collection would traverse them

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application. Without keys it answers to the names of this machine only."""
        return create_app(self._state, None if self._state.keys else LOOPBACK)

    async def check_health(self) -> None:
        """Raises EngineFailed if the replica should be replaced."""
        if (status := self._state.status) in ("failed", "stalled"):
            raise EngineFailed(
                f"the engine has {status}: {self._state.failure or 'its device does not answer'}"
            )

    def stats(self) -> dict[str, Any]:
        """The id and counters of the replica that the handle chose."""
        stats = self._state.model.engine.stats()
        return {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "running": stats.running,
            "waiting": stats.waiting,
            "rounds": stats.rounds,
            "compile_events": stats.compile_events,
        }

    def __del__(self) -> None:
        """Closes the engine. Ray calls this after the requests that it knows of."""
        self._state.close()


def build(options: Options) -> serve.Application:
    """The application that Ray runs.

    Raises what reading a bundle's manifest raises, and BadInput for an invalid file of keys.
    """
    signed_by = options.require_signature
    slots = read_manifest(locate_bundle(options.bundle, signed_by), signed_by).grid.batch[-1]
    config = ServingConfig(
        bundle=options.bundle,
        target=options.target,
        draft=options.draft,
        k=options.k,
        max_waiting=options.max_waiting,
        require_signature=signed_by,
        prefix_caching=options.prefix_caching,
        name=options.name,
        temperature=options.temperature,
    )
    if not (options.api_keys or options.without_keys):
        raise BadInput(
            "the server would be open to everyone who can reach Ray's proxy: give api_keys, a file with one key per "
            "line, or without_keys=true if the proxy listens to its own machine only"
        )
    keys = (
        make_keys(read_keys(options.api_keys), str(options.api_keys), options.prefix_salt == "key")
        if options.api_keys
        else ApiKeys()
    )
    return make_deployment(options, slots).bind(config, choose_limits(options, slots), keys)


def choose_limits(options: Options, slots: int) -> ServerLimits:
    """Limits under which a replica takes all that Ray sends it, also with one key or none."""
    choices = max(ServerLimits.choices_per_key, slots + options.max_waiting)
    return ServerLimits(drain_seconds=options.drain_seconds, choices_per_key=choices)


def make_deployment(options: Options, slots: int) -> serve.Deployment:
    """A deployment where each replica takes what fills its slots and its queue; Ray queues the rest."""
    deploy = serve.deployment(
        name="dflash",
        num_replicas=options.replicas,
        ray_actor_options=options.actor,
        max_ongoing_requests=slots + options.max_waiting,
        max_queued_requests=options.max_queued,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=options.drain_seconds + GRACE_SECONDS,
        max_constructor_retry_count=3,
    )
    return deploy(serve.ingress()(Replica))
