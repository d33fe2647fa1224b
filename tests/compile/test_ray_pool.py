"""The Ray pool: crashed processes, nodes with another environment, results that are not what was asked for."""

import importlib.util
import json
import os
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.compile.pipeline import ray_pool
from dflash_aot.compile.pipeline.executable_builder import CompileJob, CompileResult
from dflash_aot.compile.pipeline.ray_pool import LOCAL_RAY, Cluster, RayPool, check_result, connect
from dflash_aot.compile.programs.programs import BundledPrograms
from tests.ray_processes import wait_for_running

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture(scope="module")
def manifest(bundle):
    return read_manifest(bundle("tiny"))


@pytest.fixture(scope="module")
def compile_jobs(bundle, manifest) -> list[CompileJob]:
    source = BundledPrograms(manifest, Store(bundle("tiny")))
    return [
        CompileJob(one.signature, source.known, source.export(one.signature), one.key, one.compiler_options)
        for one in manifest.entries
    ]


@pytest.fixture(scope="module")
def connection():
    with connect(LOCAL_RAY, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["XLA_FLAGS"]}):
        yield


@pytest.fixture
def cluster(connection) -> Cluster:
    import ray  # noqa: PLC0415  it takes a second

    return Cluster(ray, LOCAL_RAY)


@pytest.fixture
def returned(manifest, bundle):
    store, entry = Store(bundle("tiny")), manifest.entries[0]
    return (
        msgspec.json.encode(CompileResult(entry)),
        store.executable_path(entry).read_bytes(),
        store.program_path(entry).read_bytes(),
    )


def test_pool_compiles_its_jobs_and_ends_its_tasks(cluster, manifest, compile_jobs, tmp_path):
    store = Store(tmp_path / "bundle")
    pool = RayPool(cluster, manifest.environment, store, 2)
    with store.open_for_building():
        entry = pool.start(compile_jobs[0]).result()
    assert (entry.key, entry.program) == (manifest.entries[0].key, manifest.entries[0].program)
    assert store.find(compile_jobs[0].key, compile_jobs[0].signature, compile_jobs[0].program) == entry
    futures = [pool.start(job) for job in compile_jobs[:4]]
    wait_for_running("compile_on_node")
    pool.close()
    assert all(one.cancelled() or isinstance(one.exception(), BuildFailed) for one in futures)
    wait_for_running("compile_on_node", count=0)
    with pytest.raises(BuildFailed, match="the build was cancelled"):
        cluster.call(json.loads, "{}")


def test_call_fails_after_three_crashed_processes(cluster):
    """Each process replaces itself by a program that fails. Ray listens on loopback only."""
    import ray  # noqa: PLC0415  it takes a second

    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")
    with pytest.raises(BuildFailed, match=r"^3 processes crashed in a row.* Ray's logs are on its node"):
        cluster.call(os.execlp, "false", "false")
    assert cluster.call(json.loads, '"the next one lives"') == "the next one lives"


def test_node_that_cannot_start_a_task_says_why(cluster):
    with pytest.raises(BuildFailed, match=r"^a task could not start on a node: Expecting .* dflash-aot\[ray\]$"):
        cluster.call(json.loads, "{")


def test_node_with_another_environment_is_refused(manifest, compile_jobs):
    for changes, words in [
        ({"jax": "0.0.1", "xla_flags": "--a=1"}, "jax {jax} there, 0.0.1 here; xla_flags {flags} there, --a=1 here"),
        ({"cpu_features": ("avx1024",)}, "cpu_features {features} there, avx1024 here"),
    ]:
        here, other = manifest.environment, structs.replace(manifest.environment, **changes)
        result, executable, _ = ray_pool.compile_on_node(
            msgspec.json.encode(other), msgspec.json.encode(compile_jobs[0])
        )
        failure = msgspec.json.decode(result, type=CompileResult).failure
        assert failure.startswith("Ray's node ") and ray_pool.REMEDY in failure
        assert words.format(jax=here.jax, flags=here.xla_flags, features=" ".join(here.cpu_features)) in failure
        assert executable == b""


def test_result_is_verified(returned, compile_jobs, manifest):
    result, executable, program = returned
    other = msgspec.json.encode(CompileResult(manifest.entries[1]))
    assert check_result(compile_jobs[0], *returned) == manifest.entries[0]
    for broken, words in (
        ((result, executable[:-1], program), "bytes, the manifest says"),
        ((result, executable[:-1] + b"?", program), "its sha256 is"),
        ((result, executable, executable), "bytes, the manifest says"),
        ((other, executable, program), "the build record of"),
        ((b"{", executable, program), "returned an invalid executable"),
        ((msgspec.json.encode(CompileResult(None, "no memory")), b"", b""), "^no memory$"),
    ):
        with pytest.raises(BuildFailed, match=words):
            check_result(compile_jobs[0], *broken)


def test_result_of_another_program_or_key_is_refused(returned, manifest, compile_jobs):
    job = structs.replace(compile_jobs[0], program=bytes(len(compile_jobs[0].program)))
    with pytest.raises(BuildFailed, match="an executable that was compiled from another program"):
        check_result(job, *returned)
    job = structs.replace(compile_jobs[0], key=compile_jobs[1].key)
    result, _, _ = ray_pool.compile_on_node(msgspec.json.encode(manifest.environment), msgspec.json.encode(job))
    assert "has another version of dflash-aot" in msgspec.json.decode(result, type=CompileResult).failure


def test_cluster_without_cpus_is_refused():
    """Its resources as Ray lists them. A cluster made for the test would leave its address to later starts of Ray."""
    ray = SimpleNamespace(cluster_resources=lambda: {"memory": 1e9, "node:127.0.0.1": 1.0})
    with pytest.raises(BadInput, match="head:6379 has no CPU, and each executable is compiled on one"):
        Cluster(ray, "head:6379")


def test_unusable_address_is_refused():
    for address, words in [
        ("ray://head:10001", "Ray's client is not supported"),
        ("head", "give host:port"),
        ("127.0.0.1:99999", "no conn"),
    ]:
        with pytest.raises(BadInput, match=words), connect(address, {}):
            raise AssertionError
