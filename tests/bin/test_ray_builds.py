"""dflash-precompile --executor ray: a crashed worker, unreachable clusters, refused flags."""

import importlib.util
import socket
import sys
from contextlib import closing

import pytest

from dflash_aot.bin import precompile

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
