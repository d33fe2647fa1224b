"""Latency and requests per second beside 1-byte chunks: python -m tests.server.attack_figures BUNDLE [REPEATS]

Prints medians and ranges for a server with a key: alone, and beside each attack. The attackers are a process of their
own, which shares the cores; in each of the repeats (default 5) everything is measured, in another order.
"""

import http.client
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from socket import create_connection

from tests.server.conftest import KEY, Server
from tests.server.raw_client import head, locate

COMPLETIONS, HEALTH = "/v1/completions", "/health"
BODY = json.dumps({"prompt": "import os", "max_tokens": 32, "temperature": 0, "stop_token_ids": []})
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
TINY = b"1\r\na\r\n"
OPEN, NO_KEY = head("GET", HEALTH, transfer_encoding="chunked"), head("POST", COMPLETIONS, transfer_encoding="chunked")
KEYED = head("POST", COMPLETIONS, transfer_encoding="chunked", **AUTHORIZED)
ATTACKS = {  # number of connections, and the head of their requests
    "alone": (0, b""),
    "1 on an open path": (1, OPEN),
    "8 on an open path": (8, OPEN),
    "1 without a key": (1, NO_KEY),
    "8 without a key": (8, NO_KEY),
    "8 with a key": (8, KEYED),
}
ASKED, CALLERS, SECONDS = 5, 4, 3  # requests one by one; callers of a closed loop, its length
Address = tuple[str, int]


def send_chunks(address: Address, start: bytes, connections: int) -> None:
    """Sends tiny chunks until the process ends; a connection that the server closes is opened again."""

    def send() -> None:
        while True:
            with suppress(OSError), create_connection(address) as connection:
                connection.sendall(start)
                while True:
                    connection.sendall(TINY * 40_000)

    for _ in range(connections):
        threading.Thread(target=send).start()


@contextmanager
def attack(address: Address, connections: int, start: bytes) -> Iterator[None]:
    """Attackers in a process of their own."""
    if not connections:
        yield
        return
    process = get_context("spawn").Process(target=send_chunks, args=(address, start, connections))
    process.start()
    time.sleep(1.5)  # Python starts, and the server's buffers fill
    try:
        yield
    finally:
        process.kill()
        process.join()


def ask(connection: http.client.HTTPConnection, path: str) -> float:
    """Seconds of a request."""
    began = time.monotonic()
    if path == HEALTH:
        connection.request("GET", path)
    else:
        connection.request("POST", path, BODY, {"content-type": "application/json", **AUTHORIZED})
    response = connection.getresponse()
    response.read()
    assert response.status == 200
    return time.monotonic() - began


def measure_rate(address: Address) -> float:
    """Requests per second of a closed loop."""
    began = time.monotonic()

    def call(_: int) -> int:
        connection, answered = http.client.HTTPConnection(*address), 0
        while time.monotonic() - began < SECONDS:
            ask(connection, COMPLETIONS)
            answered += 1
        connection.close()
        return answered

    with ThreadPoolExecutor(CALLERS) as callers:
        return sum(callers.map(call, range(CALLERS))) / (time.monotonic() - began)


def ask_new(address: Address, path: str) -> float:
    """Milliseconds of a request on a new connection."""
    connection = http.client.HTTPConnection(*address)
    try:
        return 1000 * ask(connection, path)
    finally:
        connection.close()


def main(bundle: str, repeats: str = "5") -> None:
    server = Server.start(Path(bundle), "--preload", key=KEY).wait_until_ready()
    address, names, found = locate(server), list(ATTACKS), defaultdict[str, list[float]](list)
    for _ in range(ASKED):
        ask_new(address, COMPLETIONS)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before", flush=True)
    for repeat in range(int(repeats)):
        turn = repeat % len(names)
        for name in (*names[turn:], *names[:turn]):
            with attack(address, *ATTACKS[name]):
                found[f"{name}: ms of a request"] += [ask_new(address, COMPLETIONS) for _ in range(ASKED)]
                found[f"{name}: ms of {HEALTH}"] += [ask_new(address, HEALTH) for _ in range(ASKED)]
                found[f"{name}: requests/s"].append(measure_rate(address))
    for figure, values in found.items():
        alone = statistics.median(found[f"alone:{figure.partition(':')[2]}"])
        median = statistics.median(values)
        print(f"{figure}: {median:.4g} ({min(values):.3g} to {max(values):.3g}), {median / alone:.2f} of alone")
    print(f"load {os.getloadavg()[0]:.1f} after; exit code {server.stop()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
