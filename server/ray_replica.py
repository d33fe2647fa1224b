"""Ray Serve deployment: replicas that open a bundle each and get requests from Ray's proxies.

Imported only where Ray is installed:

serve run dflash_aot.server.ray_replica:build bundle=s3://bucket/served/qwen3 replicas=2 api_keys=keys.txt
"""

import gc
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import ray
from pydantic import BaseModel, ConfigDict, Field, Json
from ray import serve
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import slice_placement_group
from starlette.types import ASGIApp

from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BadInput, DflashError, EngineFailed, HostFailed
from dflash_aot.cache.model_config.speculative_config import KChoice, KRanges
from dflash_aot.cache.remote.transfer import locate_bundle
from dflash_aot.runtime.engine_parts import follow
from dflash_aot.runtime.host_group import FollowerGroup, HostRole, find_group, join_group
from dflash_aot.server.app import create_app
from dflash_aot.server.limits import ApiKeys, ServerLimits, make_keys, read_keys
from dflash_aot.server.middleware import LOOPBACK
from dflash_aot.server.served_model import ServerState, ServingConfig

logger = logging.getLogger(__name__)
GRACE_SECONDS = 10.0  # after draining, for the engine's thread to end
HEALTH_SECONDS = 5.0  # between health checks; Ray replaces a replica after three failures in a row
RESERVE_SECONDS = 600.0  # for Ray to reserve the hosts of a slice
FETCH_SECONDS = 1800.0  # for the followers to start and to fetch the bundle
RAY_GENERATIONS = {"v5e": "v5litepod", "tpu7x": "v7x"}  # where Ray has another name
SLICE_LABEL, WORKER_LABEL = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"  # of Ray's nodes


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
    kv_offloading_size: float = Field(0, ge=0)
    prefix_salt: Literal["key", "none"] = "key"
    api_keys: Path | None = None  # a file of keys, read where the application is built
    without_keys: bool = False  # confirms that no keys are wanted
    replicas: int = Field(1, ge=1)
    # Ray's resources of a replica; a TPU slice of one host: {"resources": {"TPU": 4}}; of several hosts its head, which
    # reserves the chips: {"resources": {"TPU-v5litepod-16-head": 1}}.
    actor: dict[str, Any] = {"num_cpus": 1}
    max_waiting: int = Field(16, ge=1)  # requests in the queue of each replica
    max_queued: int = Field(256, ge=1)  # requests that wait at each proxy in addition
    drain_seconds: float = Field(30.0, ge=0)


# -- groups of hosts


class Follower:
    """The actor of a follower. Its process ends with the group."""

    def __init__(self, config: ServingConfig):
        self._config = config

    def fetch(self) -> None:
        """Fetches the bundle. Raises what reading its manifest raises, before hosts wait for each other."""
        read_bundle(self._config)

    def follow(self, role: HostRole) -> None:
        """Joins the leader, and repeats its device calls until it ends. Does not return."""
        code = HostFailed.exit_code
        try:
            config = self._config
            bundle, manifest = read_bundle(config)
            select_jax_platforms(manifest.environment.platform)
            group = join_group(role, manifest)
            assert isinstance(group, FollowerGroup)
            follow(group, bundle, config.target, config.draft, config.require_signature)
            code = 0
        except DflashError as error:
            logger.error("host %d: %s", role.rank, error)
            code = error.exit_code
        except Exception:
            logger.exception("host %d", role.rank)
        finally:
            os._exit(code)  # JAX's own end would wait for all hosts


def read_bundle(config: ServingConfig) -> tuple[Path, Manifest]:
    """The bundle's directory on this host, fetched where it is a URL, and its manifest. Raises what reading raises."""
    bundle = locate_bundle(config.bundle, config.require_signature)
    return bundle, read_manifest(bundle, config.require_signature)


def join_followers(config: ServingConfig) -> Sequence[ray.actor.ActorHandle[Any]]:
    """Reserves the hosts of the bundle's slice, starts an actor on each other host, and joins them as their leader.

    Returns the actors, which end with this process; none where the bundle needs one host.

    Raises HostFailed where Ray has no such hosts, and what `join_group` and reading the manifest raise.
    """
    _, manifest = read_bundle(config)
    environment = manifest.environment
    if environment.hosts == 1:
        return ()
    actors = _start_actors(config, environment)
    host = ray.util.get_node_ip_address()
    leader = f"[{host}]:{_find_port()}" if ":" in host else f"{host}:{_find_port()}"
    roles = [HostRole(environment.hosts, rank, leader) for rank in range(1, environment.hosts)]
    follows = [actor.follow.remote(role) for actor, role in zip(actors, roles, strict=True)]
    Thread(target=_watch_followers, args=(follows,), daemon=True).start()
    select_jax_platforms(environment.platform)
    join_group(HostRole(environment.hosts, 0, leader), manifest)
    return actors


def _watch_followers(follows: Sequence[ray.ObjectRef[None]]) -> None:
    """Ends this process if a follower ends before the hosts have met: JAX would wait for it for ten minutes."""
    ray.wait([*follows])  # `Follower.follow` never returns: one that is over has failed
    if find_group() is None:
        logger.error("a follower ended before the hosts had met: its log has the reason")
        os._exit(HostFailed.exit_code)


def _start_actors(
    config: ServingConfig, environment: Environment
) -> Sequence[ray.actor.ActorHandle[Any]]:
    """The followers' actors by rank, from 1, when each has the bundle."""
    group = reserve_hosts(environment)
    bundles = find_bundles(environment, group)
    make: Any = ray.remote(Follower)  # Ray's types have no options of actors
    actors: list[ray.actor.ActorHandle[Any]] = []
    for rank in range(1, environment.hosts):
        place = PlacementGroupSchedulingStrategy(group, bundles[rank])
        chips = group.bundle_specs[bundles[rank]].get("TPU")
        on_host = make.options(
            num_cpus=0, resources={"TPU": chips} if chips else {}, scheduling_strategy=place
        )
        actors.append(on_host.remote(config))
    try:
        ray.get([actor.fetch.remote() for actor in actors], timeout=FETCH_SECONDS)
    except ray.exceptions.RayError as error:
        raise HostFailed(f"a follower did not start: {error}") from error
    return actors


def reserve_hosts(environment: Environment) -> PlacementGroup:
    """A bundle of Ray on each host of this host's slice; for CPU devices one for each follower. Raises HostFailed."""
    if environment.platform == "tpu":
        group = _reserve_slice(environment)
    else:
        group = placement_group([{"CPU": 1}] * (environment.hosts - 1), "SPREAD")
    if not group.wait(RESERVE_SECONDS):
        raise HostFailed(
            f"Ray did not reserve {environment.hosts} hosts in {RESERVE_SECONDS:.0f} s: see `ray status`"
        )
    return group


def _reserve_slice(environment: Environment) -> PlacementGroup:
    labels = _read_labels()[ray.get_runtime_context().get_node_id()]
    if labels.get(WORKER_LABEL) != "0" or SLICE_LABEL not in labels:
        raise HostFailed(
            "this replica is not on the first host of a TPU slice: give `actor` the resource TPU-TYPE-head, as in "
            'actor={"resources": {"TPU-v5litepod-16-head": 1}}'
        )
    generation, _, topology = environment.topology.partition(":")
    # The replica holds the head of the slice. Named slices are not reserved again.
    here = {SLICE_LABEL: labels[SLICE_LABEL]}
    reserved = slice_placement_group(
        topology,
        RAY_GENERATIONS.get(generation, generation),
        bundle_label_selector=[here] * environment.hosts,
    )
    group = reserved.placement_group
    assert group is not None
    return group


def find_bundles(environment: Environment, group: PlacementGroup) -> Mapping[int, int]:
    """The index of each host's bundle in a reserved group, by rank: on TPU the number of the host in its slice."""
    nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    if environment.platform != "tpu":
        return {index + 1: index for index in nodes}
    labels = _read_labels()
    return {int(labels[node][WORKER_LABEL]): index for index, node in nodes.items()}


def _read_labels() -> Mapping[str, Mapping[str, str]]:
    """Labels of all nodes, by the node's id."""
    return {node["NodeID"]: node["Labels"] for node in ray.nodes()}


def _find_port() -> int:
    """A free port of this host, for JAX's coordination service."""
    with closing(socket.create_server(("", 0))) as free:
        port: int = free.getsockname()[1]
    return port


class Replica:
    """One engine with the application of dflash-serve, and the methods that Ray calls on a deployment.

    Where the bundle is of several hosts, the replica leads them.
    """

    def __init__(self, config: ServingConfig, limits: ServerLimits, keys: ApiKeys):
        self._state = ServerState(config, limits, keys)
        self._followers = join_followers(config)  # actors end where nobody holds them
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
    config = ServingConfig(
        bundle=options.bundle,
        target=options.target,
        draft=options.draft,
        k=options.k,
        max_waiting=options.max_waiting,
        require_signature=options.require_signature,
        prefix_caching=options.prefix_caching,
        kv_offloading_size=options.kv_offloading_size,
        name=options.name,
        temperature=options.temperature,
    )
    slots = read_bundle(config)[1].grid.batch[-1]
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
