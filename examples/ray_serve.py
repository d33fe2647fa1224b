"""Serves a bundle by Ray Serve replicas with an OpenAI-compatible API, on this machine or the cluster of RAY_ADDRESS.

python examples/ray_serve.py bundle --replicas 2
python examples/ray_serve.py s3://bucket/served/qwen3 --replicas 4 --resources '{"TPU": 4}' --api_keys keys.txt
"""

import argparse
import json
import signal
import threading
from pathlib import Path

from ray import serve

from dflash_aot.server.middleware import LOOPBACK
from dflash_aot.server.ray_replica import Options, build


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", help="a URL, or a directory that all nodes can read")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument(
        "--resources",
        type=json.loads,
        default={},
        help="Ray resources of each replica, as JSON; on TPU one slice, see docs/ray.md",
    )
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of each replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--api_keys",
        type=Path,
        help="a file with one API key per line; required unless the host is a loopback address",
    )
    given = parser.parse_args()
    options = Options(
        bundle=given.bundle,
        replicas=given.replicas,
        actor={"num_cpus": given.cpus, "resources": given.resources},
        api_keys=given.api_keys,
        without_keys=given.api_keys is None and given.host in LOOPBACK,
    )
    stop = threading.Event()
    serve.start(http_options={"host": given.host, "port": given.port})
    # After serve.start, because Ray sets its own handlers there.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    serve.run(build(options))
    print(f"serving at http://{given.host}:{given.port}/v1", flush=True)
    stop.wait()
    serve.delete("default")  # replicas answer open requests first, while the proxies still run
    serve.shutdown()


if __name__ == "__main__":
    main()
