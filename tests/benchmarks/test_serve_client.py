"""dflash-bench serve: the load client's command."""

import stat
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dflash_aot.benchmarks.load_bench import ServeSettings, run_client


class Models(BaseHTTPRequestHandler):
    """A server of one model."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "toy"}]}')

    def log_message(self, *_: object) -> None:
        """No-op: writes no log."""


@pytest.fixture
def url():
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def make_client(directory: Path) -> str:
    """A client that writes down its arguments."""
    path = directory / "aiperf"
    path.write_text(f'#!/bin/sh\necho "$@" >> {directory}/asked\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_client_runs_once_for_each_number_of_connections(url, tmp_path):
    settings = ServeSettings(url=url, aiperf=make_client(tmp_path), connections=(1, 4), rate=2.5)
    run_client(settings, "out", lambda words: None)
    first, second = (tmp_path / "asked").read_text().splitlines()
    assert first.startswith("profile --streaming") and f"--model toy --url {url}" in first
    assert "--concurrency 1 " in first and "--artifact-dir out/serve-1 " in first and "--request-count 32 " in first
    assert "--warmup-request-count 4 " in second and '"prefix_caching": false' in second
    assert "--concurrency 4 " in second and "--request-rate 2.5 --arrival-pattern poisson" in second
