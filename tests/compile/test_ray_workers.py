"""Executables from the tasks of a Ray cluster: processes that may die, nodes that are different, bytes that are not."""

import importlib.util
import json
import os

import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.compile.pipeline import ray_worker
from dflash_aot.compile.pipeline.executable_builder import Order
from dflash_aot.compile.pipeline.ray_cluster import OWN, Cluster, connect
from dflash_aot.compile.pipeline.ray_workers import RayWorkers, check_made
from dflash_aot.compile.pipeline.worker_process import Answer
from dflash_aot.compile.programs.program_source import BundledPrograms
from tests.ray_processes import wait_for_running

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture(scope="module")
def manifest(bundle):
    return read_manifest(bundle("tiny"))


@pytest.fixture(scope="module")
def orders(bundle, manifest) -> list[Order]:
    """What a bundle that this machine compiled was compiled from."""
    source = BundledPrograms(manifest, Store(bundle("tiny")))
    return [Order(one.signature, source.known, source.export(one.signature), one.key) for one in manifest.entries]


@pytest.fixture(scope="module")
def connection():
    """One Ray for all tests of this file."""
    with connect(OWN, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}):
        yield


@pytest.fixture
def cluster(connection) -> Cluster:
    import ray  # noqa: PLC0415  it takes a second

    return Cluster(ray, OWN)


@pytest.fixture
def made(manifest, orders, bundle):
    """What a task would hand back for the first order, from the bundle."""
    store, entry = Store(bundle("tiny")), manifest.entries[0]
    return (
        msgspec.json.encode(Answer(entry)),
        store.executable_path(entry).read_bytes(),
        store.program_path(entry).read_bytes(),
    )


@pytest.mark.slow
def test_a_task_makes_what_was_ordered(cluster, manifest, orders, tmp_path):
    store = Store(tmp_path / "bundle")
    workers = RayWorkers(cluster, manifest.environment, store, 1)
    with store.open_for_building():
        entry = workers.start(orders[0]).result()
    assert (entry.key, entry.program) == (manifest.entries[0].key, manifest.entries[0].program)
    assert store.find(orders[0].key, orders[0].signature, orders[0].program) == entry


def test_what_is_left_is_ended(cluster, manifest, orders, tmp_path):
    workers = RayWorkers(cluster, manifest.environment, Store(tmp_path), 2)
    futures = [workers.start(order) for order in orders[:4]]
    wait_for_running("make_for")
    workers.leave()
    assert all(one.cancelled() or isinstance(one.exception(), BuildFailed) for one in futures)
    wait_for_running("make_for", count=0)
    with pytest.raises(BuildFailed, match="the build was left"):
        cluster.call(json.loads, "{}")


def test_processes_that_die_one_after_the_other_are_told_of_once(cluster):
    """Each becomes another program, which ends."""
    with pytest.raises(BuildFailed, match=r"^3 processes died of it, .* Ray's logs are on its node"):
        cluster.call(os.execlp, "false", "false")
    assert cluster.call(json.loads, '"the next one lives"') == "the next one lives"


def test_a_node_that_cannot_begin_says_why_in_a_line(cluster):
    with pytest.raises(BuildFailed, match=r"^a node of the cluster could not begin: Expecting .* dflash-aot\[ray\]$"):
        cluster.call(json.loads, "{")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"jax": "0.0.1", "xla_flags": "--a=1"}, "jax {jax} there, 0.0.1 here; xla_flags none there, --a=1 here"),
        ({"cpu_features": ("avx1024",)}, "cpu_features {features} there, avx1024 here"),
    ],
)
def test_a_node_that_is_not_like_this_machine_is_refused_with_both_values(manifest, orders, changes, words):
    here, other = manifest.environment, structs.replace(manifest.environment, **changes)
    answer, executable, _ = ray_worker.make_for(msgspec.json.encode(other), msgspec.json.encode(orders[0]))
    failure = msgspec.json.decode(answer, type=Answer).failure
    assert failure.startswith("Ray's node ") and ray_worker.REMEDY in failure
    assert words.format(jax=here.jax, features=" ".join(here.cpu_features)) in failure
    assert executable == b""


def test_a_node_that_would_give_it_another_key_is_refused(manifest, orders):
    order = structs.replace(orders[0], key=orders[1].key)
    answer, _, _ = ray_worker.make_for(msgspec.json.encode(manifest.environment), msgspec.json.encode(order))
    assert "has another version of dflash-aot" in msgspec.json.decode(answer, type=Answer).failure


def test_what_is_handed_back_is_verified(made, orders, manifest):
    answer, executable, program = made
    other = msgspec.json.encode(Answer(manifest.entries[1]))
    assert check_made(orders[0], *made) == manifest.entries[0]
    for broken, words in (
        ((answer, executable[:-1], program), "bytes, the manifest promises"),
        ((answer, executable[:-1] + b"?", program), "its sha256 is"),
        ((answer, executable, executable), "bytes, the manifest promises"),
        ((other, executable, program), "the build record of"),
        ((b"{", executable, program), "handed back what cannot be used"),
        ((msgspec.json.encode(Answer(None, "no memory")), b"", b""), "^no memory$"),
    ):
        with pytest.raises(BuildFailed, match=words):
            check_made(orders[0], *broken)


def test_a_program_that_was_not_ordered_is_refused(made, orders):
    order = structs.replace(orders[0], program=bytes(len(orders[0].program)))
    with pytest.raises(BuildFailed, match="an executable that was compiled from another program"):
        check_made(order, *made)


def test_a_ray_of_our_own_is_not_seen_from_elsewhere(cluster):
    import ray  # noqa: PLC0415  it takes a second

    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("address", "words"),
    [("ray://head:10001", "Ray's client is not supported"), ("head", "give host:port"), ("127.0.0.1:99999", "no conn")],
)
def test_an_address_that_cannot_be_used_is_refused(address, words):
    with pytest.raises(BadInput, match=words), connect(address, {}):
        raise AssertionError
