"""Groups of hosts: two processes with a CPU device each, their frames, and what happens where one fails."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from ml_dtypes import bfloat16

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.devices import attached_devices
from dflash_aot.cache.errors import BadInput, HostFailed
from dflash_aot.runtime.command_stream import (
    HEADER,
    Call,
    CommandPlayer,
    CommandStream,
    Frame,
    MirroredState,
    pack_array,
    receive_message,
    send_message,
    unpack_array,
)
from dflash_aot.runtime.executables.executable import DeviceState
from dflash_aot.runtime.executables.loaded_bundle import LazyLoader
from dflash_aot.runtime.host_group import HostRole, read_role

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
    precompile(*pair, bundle, grid=grid, platform="cpu", tensor_parallel=2, dtype="float32", self_test=False)
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
        assert answers[0].status_code >= 500 and "error" in answers[0].json()
        assert leader.wait(PATIENCE) == FAILED
        assert "the group of hosts failed: host 1" in leader.stderr.read()


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


def test_state_is_repeated_by_a_follower(ends):
    devices = attached_devices("cpu")
    arrays = (ArraySpec("lengths", (3,), "int32"), ArraySpec("kept", (2,), "float32"))
    stream = CommandStream(ends[:1])
    leader, follower = MirroredState(arrays, devices, stream), DeviceState(arrays, devices)
    made = leader.to_device(np.array([4, 5, 6], np.int32))
    leader.replace(["lengths"], [made])
    leader.replace(["kept"], [leader.zeros(arrays[1])])
    stream.close()
    player = CommandPlayer(LazyLoader(lambda name: pytest.fail(str(name)), ()), follower)
    frame = receive_message(ends[1], Frame)
    assert not player.play(frame)
    assert np.asarray(follower.read(["lengths"])[0]).tolist() == [4, 5, 6]
    with pytest.raises(HostFailed, match="frame 1 of the leader is missing, 0 came"):
        player.play(frame)
    with pytest.raises(HostFailed, match="does not have"):
        player.play(Frame(1, (Call(("verify", (1,)), (), 9),)))


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
