"""Runs a server with limits that dflash-serve has no flags for: run_limited_server.py BUNDLE LIMITS_AS_JSON."""

import json
import logging
import sys

from dflash_aot.server.lifecycle import LifecycleObserver, listen, serve
from dflash_aot.server.limits import ServerLimits
from dflash_aot.server.served_model import ServerState, ServingConfig


class Announcer(LifecycleObserver):
    """Prints the lines that `Server` of the tests waits for."""

    def __init__(self, url: str):
        self._url = url

    def on_listening(self) -> None:
        print(f"listening at {self._url}", file=sys.stderr, flush=True)

    def on_ready(self) -> None:
        print("ready after a while", file=sys.stderr, flush=True)


def main(bundle: str, limits: str) -> None:
    """Serves until SIGTERM."""
    logging.basicConfig(format="%(levelname)s %(message)s")
    state = ServerState(ServingConfig(bundle, preload=False), ServerLimits(**json.loads(limits)))
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        serve(state, listener, None, observer=Announcer(f"http://{host}:{port}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
