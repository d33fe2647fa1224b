"""dflash-precompile --executor ray: a crashed worker, unreachable clusters, refused flags."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from dflash_aot.bin import precompile
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.verification import find_file_flaws
from tests.ray_processes import TIMEOUT, wait_for_running

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

GRID = "batch=1 length=16 k=0 prefill=4"


@pytest.fixture
def flags(tied) -> list[str]:
    pair = [f"--target={tied.target}", f"--draft={tied.draft}"]
    return [*pair, f"--buckets={GRID}", "--sampling=greedy", "--platform=cpu", "--json"]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Hides the user's own cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.slow
def test_killed_ray_worker_is_replaced(command, flags, tmp_path):
    store = f"--store={tmp_path / 'store'}"
    on_ray = [*flags, f"--bundle={tmp_path / 'first'}", store, "--executor=ray", "--jobs=2"]
    line = [sys.executable, "-m", "dflash_aot.bin.precompile", *on_ray]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        os.kill(wait_for_running("compile_on_node", process.pid)[0], signal.SIGKILL)
        out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    first = json.loads(out)
    count = first["executables"]
    assert (first["compiled"], first["store"]["written"]) == (count, count)
    assert "compiling on a local Ray cluster: 2 at a time" in err
    assert not any(chatter in err for chatter in ("raylet", "Traceback", "Warning", "worker"))
    assert find_file_flaws(tmp_path / "first", read_manifest(tmp_path / "first")) == []

    second = json.loads(command(precompile, *flags, f"--bundle={tmp_path / 'second'}", store).out)
    assert (second["compiled"], second["store"]["hits"]) == (0, count)
    assert read_manifest(tmp_path / "second").entries == read_manifest(tmp_path / "first").entries


def test_unusable_executor_is_refused_by_name(command, flags, tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
    for given, words in (
        (["--executor=ray", f"--ray_address={address}"], f"--executor ray: no connection to {address}: "),
        (["--ray_address=head:6379"], "--ray_address head:6379 without --executor ray"),
        (["--executor=ray", "--plan"], "--executor cannot be given with it"),
    ):
        done = command(precompile, *flags, f"--bundle={tmp_path / 'bundle'}", *given)
        assert (done.code, done.out) == (2, "") and words in done.err


def test_missing_ray_is_reported_with_its_install_command(command, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    done = command(precompile, *flags, f"--bundle={tmp_path / 'bundle'}", "--executor=ray")
    assert done.code == 2 and 'Ray is not installed: pip install "dflash-aot[ray]"' in done.err
