"""Groups of hosts: two processes with a CPU device each, their frames, and what happens where one fails."""

import importlib.util
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from ml_dtypes import bfloat16

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.devices import attached_devices
from dflash_aot.cache.errors import BadInput, HostFailed, IncompatibleBundle
from dflash_aot.runtime import Engine, SamplingParams, host_group
from dflash_aot.runtime.command_stream import (
    ALIVE_FRAME,
    HEADER,
    Call,
    Close,
    CommandPlayer,
    CommandStream,
    Frame,
    MirroredState,
    pack_array,
    receive_message,
    send_message,
    unpack_array,
)
from dflash_aot.runtime.engine_parts import load_engine_parts
from dflash_aot.runtime.executables.executable import DeviceState
from dflash_aot.runtime.executables.loaded_bundle import LazyLoader
from dflash_aot.runtime.host_group import (
    ALIVE,
    FollowerGroup,
    HostRole,
    LeaderGroup,
    Status,
    StreamAddress,
    accept_followers,
    connect_to_leader,
    read_role,
)
from tests.ray_processes import find_running
from tests.runtime.stepper import settle
from tests.server.test_ray_replica import start_example

PATIENCE = 300  # seconds, for a busy machine
GRID = "batch=1 length=32 k=0,3 prefill=16"
FAILED = HostFailed.exit_code
# XLA:CPU writes devices into an executable, so process 0 compiles while process 1 only exists.
BUILD = """
import sys
import jax
from jax.experimental import multihost_utils
rank, leader, *pair, bundle, grid = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(leader, 2, int(rank))
jax.devices()
if rank == "0":
    from dflash_aot.compile import precompile
    options = {"platform": "cpu", "tensor_parallel": 2, "dtype": "float32", "sampling": ["greedy"], "self_test": False}
    precompile(*pair, bundle, grid=grid, **options)
vars(multihost_utils)["distributed"].global_state.client.wait_at_barrier("built", 600000)
"""


def find_leader() -> str:
    """An address that is free, below the ports that the system gives to others."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return f"127.0.0.1:{port}"
    raise AssertionError("no port is free")


@contextmanager
def started(*commands: list[str], **options: object) -> Iterator[list[subprocess.Popen]]:
    """Processes with one CPU device each, killed at the end."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen([sys.executable, *command], env=environment, text=True, **options)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


@pytest.fixture(scope="module")
def bundle_of_two(tied, tmp_path_factory) -> Path:
    bundle = tmp_path_factory.mktemp("two") / "bundle"
    given = [find_leader(), str(tied.target), str(tied.draft), str(bundle), GRID]
    with started(*(["-c", BUILD, str(rank), *given] for rank in (0, 1))) as processes:
        assert [process.wait(PATIENCE) for process in processes] == [0, 0]
    return bundle


@pytest.fixture
def group(bundle_of_two) -> Callable:
    """Starts a command on both hosts."""

    def start(command: str, *arguments: str):
        leader = find_leader()
        fixed = ["-m", f"dflash_aot.bin.{command}", f"--bundle={bundle_of_two}", "--hosts=2", f"--leader={leader}"]
        commands = ([*fixed, *arguments, f"--host_rank={rank}"] for rank in (0, 1))
        return started(*commands, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


def write_lines(tied) -> tuple[str, list[list[int]]]:
    """Requests, and the reference's tokens."""
    prompts = [prompt for prompt in tied.facts["prompts"] if len(prompt["prompt_ids"]) < 13]
    lines = [
        {
            "prompt_ids": one["prompt_ids"],
            "max_tokens": min(16, one["max_new_tokens"]),
            "stop_token_ids": one["stop_token_ids"] or [],
        }
        for one in prompts
    ]
    return "".join(f"{json.dumps(line)}\n" for line in lines), [one["new_token_ids"][:16] for one in prompts]


def test_two_hosts_give_the_reference_tokens_and_end_together(group, tied):
    lines, expected = write_lines(tied)
    with group("run", "--input=-", "--stats", "--json") as (leader, follower):
        out, err = leader.communicate(lines, PATIENCE)
        assert (leader.returncode, follower.wait(PATIENCE)) == (0, 0), err + follower.stderr.read()
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{")]  # not Gloo's
    assert [answer["token_ids"] for answer in answers] == expected
    assert any(sum(answer["accepted"]) for answer in answers)
    assert json.loads(err.splitlines()[-1])["compile_events"] == 0
    assert "compile events" not in follower.stderr.read()


def test_follower_ends_where_the_leader_dies(group):
    with group("run", "--input=-") as (leader, follower):
        leader.stdin.write('{"prompt_ids": [5], "max_tokens": 2}\n')
        leader.stdin.flush()
        while not (line := leader.stdout.readline()).startswith("{"):  # Gloo's
            assert line
        assert json.loads(line)["finish_reason"] == "length"
        leader.kill()
        assert follower.wait(PATIENCE) == FAILED
        assert "the leader is gone" in follower.stderr.read()


def test_requests_end_with_an_error_where_a_follower_dies(group):
    with group("serve", "--port=0") as (leader, follower):
        lines = []
        while "ready after" not in (lines or [""])[-1]:
            lines.append(leader.stderr.readline())
            assert lines[-1], "".join(lines)
        url = next(line.split()[3] for line in lines if "listening at" in line)
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            follower.send_signal(signal.SIGSTOP)  # so that the request is under way
            answers: list[httpx.Response] = []
            body = {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}
            asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body)))
            asking.start()
            running = re.compile(r"^vllm:num_requests_running\{.*\} 1\.0$", re.MULTILINE)
            while not running.search(client.get("/metrics").text):
                assert leader.poll() is None
            follower.kill()
            asking.join(PATIENCE)
        assert answers[0].status_code == 500 and answers[0].json()["error"]["code"] == "engine_failed"
        assert leader.wait(PATIENCE) == FAILED
        assert "the group of hosts failed: host 1" in leader.stderr.read()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_replica_of_ray_leads_an_actor_as_follower(bundle_of_two):
    with start_example(bundle_of_two) as example:
        body = {"prompt": [1], "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{example.url}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.json()["usage"]["completion_tokens"] == 16
        assert len(find_running("Follower", example.process.pid)) == 1
        example.process.terminate()
        assert example.process.wait(PATIENCE) == 0


# -- how hosts meet, and what ends a group


def call_leader(port: int, rank: int, manifest: str = "same", token: str = "secret") -> socket.socket:
    address = msgspec.json.encode(StreamAddress(port, token)).decode()
    return connect_to_leader("127.0.0.1", address, HostRole(3, rank, ""), manifest)


@pytest.mark.parametrize(
    ("rank", "manifest", "words"),
    [(2, "same", ""), (3, "same", "rank 3"), (1, "same", "two hosts have rank 1"), (2, "other", "the bundle other")],
)
def test_leader_lets_in_who_has_token_rank_and_bundle(rank, manifest, words):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        links = pool.submit(accept_followers, listener, HostRole(3, 0, ""), "same", "secret")
        port = listener.getsockname()[1]
        with pytest.raises(IncompatibleBundle, match="the token is wrong"):
            call_leader(port, 1, token="guess")
        socket.create_connection(("127.0.0.1", port)).close()
        first = stack.enter_context(call_leader(port, 1))
        with pytest.raises(IncompatibleBundle, match=words) if words else nullcontext():
            stack.enter_context(call_leader(port, rank, manifest))
        with pytest.raises(IncompatibleBundle, match=words) if words else nullcontext():
            accepted = [stack.enter_context(link) for link in links.result(PATIENCE)]
            assert accepted[0].getpeername() == first.getsockname()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (lambda group, link: link.close(), "host 1: another host closed"),
        (lambda group, link: (link.sendall(b"\x09"), link.close()), "host 1: another host closed"),
        (lambda group, link: send_message(link, Status(failure="it broke")), "host 1 failed: it broke"),
        (lambda group, link: send_message(link, Status("weights")), "sent an unexpected message"),
        (lambda group, link: setattr(group, "is_stuck", lambda: True), "a host hangs"),
        (lambda group, link: group._heard.update({1: -100.0}), "host 1 has said nothing for 60 s"),
    ],
)
def test_leader_learns_what_ends_a_group(ends, does, words):
    group, reasons = LeaderGroup(HostRole(2, 0, ""), "same", ends[:1]), queue.Queue()
    group.end_process, group.on_failure = threading.Event().set, reasons.put
    for status in (Status("weights"), ALIVE, ALIVE):
        send_message(ends[1], status)
    group.wait_until_loaded("weights")
    group.stream._last_sent -= 100
    group.watch()
    assert receive_message(ends[1], Frame) == ALIVE_FRAME
    does(group, ends[1])
    assert words in reasons.get(timeout=PATIENCE) and words in group.failure


def test_follower_says_that_it_is_alive_and_ends_where_the_leader_is_silent(ends, monkeypatch):
    monkeypatch.setattr(host_group, "ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(host_group, "STALL_SECONDS", 1.0)
    group, ended = FollowerGroup(HostRole(2, 1, ""), "same", ends[0]), threading.Event()
    group.end_process = ended.set
    group.start()
    for frame in (ALIVE_FRAME, Frame(0, ())):
        send_message(ends[1], frame)
    assert [receive_message(ends[1], Status) for _ in range(2)] == [ALIVE, ALIVE]
    assert group.next_frame().number == 0 and ended.wait(PATIENCE)


def test_at_the_end_signs_of_life_are_passed_over_and_no_failure_is_lost():
    with ExitStack() as stack:
        pairs = [[stack.enter_context(one) for one in socket.socketpair()] for _ in range(2)]
        group = LeaderGroup(HostRole(3, 0, ""), "same", [here for here, _ in pairs])
        group.watch()
        closing = threading.Thread(target=group.close)
        closing.start()
        (_, first), (_, second) = pairs
        assert receive_message(first, Frame).is_last and receive_message(second, Frame).is_last
        send_message(second, Status(failure="another state"))
        closing.join(0.2)  # in which nobody else may read it
        send_message(first, ALIVE)
        first.shutdown(socket.SHUT_WR)
        closing.join(PATIENCE)
        assert group.failure == "host 2 failed: another state"
        group.stream.send_alive(0)
        assert not first.recv(1)  # nothing follows the end


def test_hosts_that_do_not_connect_are_named(monkeypatch):
    monkeypatch.setattr(host_group, "MEET_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(HostFailed, match=r"hosts \[1, 2\] started"):
        accept_followers(listener, HostRole(3, 0, ""), "same", "secret")


def test_follower_with_other_weights_or_that_takes_nothing_is_reported(ends):
    group = LeaderGroup(HostRole(2, 0, ""), "same", ends[:1])
    send_message(ends[1], Status("others"))
    with pytest.raises(IncompatibleBundle, match="host 1 has the weights others"):
        group.wait_until_loaded("weights")
    ends[0].settimeout(0.01)  # its connection takes about 200 kB
    MirroredState((), attached_devices("cpu"), group.stream).to_device(np.arange(1 << 20))
    with pytest.raises(HostFailed, match="a host takes no more commands"):
        group.stream.close()


def test_follower_repeats_random_requests(bundle, ends):
    """With prefixes, preemptions, sampling, cancels and deadlines."""
    parts = load_engine_parts(bundle("sampled"), None, None, k=7, preload=False)
    arrays, devices = parts.bundle.manifest.state, attached_devices("cpu")
    stream, frames, streams, rng = CommandStream(ends[:1]), [], [], random.Random(5)
    leader, follower = MirroredState(arrays, devices, stream), DeviceState(arrays, devices)

    def receive() -> None:
        while not (frames and frames[-1].is_last):
            frames.append(receive_message(ends[1], Frame))

    with ThreadPoolExecutor(1) as pool, ends[0], Engine(replace(parts, state=leader)) as engine:
        receiving = pool.submit(receive)
        pages = engine._loop._scheduler.kv.pool
        pages.take(pages.available - 30)  # of 78: too few for three long requests
        for number in range(60):
            prompt = [*range(rng.choice((0, 20, 60))), *rng.choices(range(512), k=rng.randint(1, 40))]
            k, temperature = rng.choice((None, 0)), rng.choice((0, 1))
            params = SamplingParams(max_tokens=rng.randint(1, 90), stop_token_ids=(), temperature=temperature, k=k)
            streams.append(engine.stream(prompt, params, deadline=0.001 if number % 10 == 9 else None))
            if number % 10 == 5:
                streams[number].close()
        assert {one.result().finish_reason for one in streams} == {"length", "cancelled"}
        stats = settle(engine, len(streams))
        engine._thread.close()  # the engine's own close frees what is read here
        stream.close()
        receiving.result(PATIENCE)
        player = CommandPlayer(parts.bundle.executables, follower)
        assert [player.play(frame) for frame in frames].count(False) == 1
        for array in arrays:
            assert np.array_equal(*leader.read([array.name]), *follower.read([array.name])), array.name
    assert min(stats.preemptions, stats.prefix_hits) > 0


# -- frames


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for one in pair:
        one.close()


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_, bfloat16, np.int8])
def test_arrays_cross_bit_by_bit_and_even_rows_as_one_number(dtype):
    rng = np.random.default_rng(2)
    array = np.zeros((3, 200, 128), dtype)
    array[1] = dtype(-1)
    array[2, 7] = rng.integers(0, 2, 128)
    array[0, 0, 5] = np.zeros(1, dtype)[0] if dtype in (np.bool_, np.int32, np.int8) else dtype(-0.0)
    for given in (array, array[:1, :3, :4], array[0, 0, :0]):
        put = msgspec.msgpack.decode(msgspec.msgpack.encode(pack_array(7, given)), type=type(pack_array(7, given)))
        assert unpack_array(put).tobytes() == given.tobytes() and unpack_array(put).shape == given.shape
    assert len(pack_array(7, array).data) <= (600 + 2 * 128) * array.itemsize


def test_follower_refuses_what_it_cannot_repeat():
    state = DeviceState((ArraySpec("lengths", (3,), "int32"),), attached_devices("cpu"))
    player = CommandPlayer(LazyLoader(lambda name: pytest.fail(str(name)), ()), state)
    assert not player.play(Frame(0, (Close(state.digest()),)))
    for frame, words in [
        (Frame(0, ()), "frame 1 of the leader is missing, 0 came"),
        (Frame(1, (Call(("verify", (1,)), (), 9),)), "does not have"),
        (Frame(2, (Close("another"),)), "is not the leader's"),
    ]:
        with pytest.raises(HostFailed, match=words):
            player.play(frame)


def test_frames_of_strangers_are_refused(ends):
    here, there = ends
    for sent, words in [
        (HEADER.pack(1 << 31), "a frame of 2147483648 bytes"),
        (HEADER.pack(3) + b"\xc1\xc1\xc1", "an invalid frame"),
    ]:
        there.sendall(sent)
        with pytest.raises(HostFailed, match=words):
            receive_message(here, Frame)
    send_message(there, {"token": 5})
    with pytest.raises(HostFailed, match="an invalid frame"):
        receive_message(here, HostRole)
    for put in (pack_array(1, np.zeros(3, np.float32)), pack_array(1, np.zeros((200, 100), np.int32))):
        for changed in (
            {"shape": (7, 7)},
            {"dtype": "object"},
            {"shape": (1 << 40,)},
            {"shape": (-1,)},
            {"rows": (9999,)},
        ):
            with pytest.raises(HostFailed, match="the leader sent an array"):
                unpack_array(msgspec.structs.replace(put, **changed))
    there.close()
    with pytest.raises(HostFailed, match="closed its connection"):
        receive_message(here, Frame)


def test_role_follows_from_the_environment_of_a_slice():
    names = {"TPU_WORKER_HOSTNAMES": "a,b,c,d"}
    assert read_role({}) is None and read_role({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) is None
    assert read_role({**names, "TPU_WORKER_ID": "2"}) == HostRole(4, 2, "a:8484")
    for rank in ("", "4", "x"):
        with pytest.raises(BadInput, match="TPU_WORKER_ID"):
            read_role({**names, "TPU_WORKER_ID": rank})
