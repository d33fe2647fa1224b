"""A server under limits that dflash-serve has no flags for: limited_server.py BUNDLE LIMITS, which are JSON."""

import json
import logging
import sys

from dflash_aot.server.lifecycle import Observer, listen, serve
from dflash_aot.server.limits import Limits
from dflash_aot.server.served_model import Serving
from dflash_aot.server.server_state import Service


class Announcer(Observer):
    """Says what `Server` of the tests waits for."""

    def __init__(self, url: str):
        self._url = url

    def note_listening(self) -> None:
        print(f"listening at {self._url}", file=sys.stderr, flush=True)

    def note_ready(self) -> None:
        print("ready after a while", file=sys.stderr, flush=True)


def main(bundle: str, limits: str) -> None:
    """Until SIGTERM."""
    logging.basicConfig(format="%(levelname)s %(message)s")
    service = Service(Serving(bundle, preload=False), Limits(**json.loads(limits)))
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        serve(service, listener, None, observer=Announcer(f"http://{host}:{port}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
