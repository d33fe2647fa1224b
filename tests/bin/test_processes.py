"""Commands in processes of their own: signals, pipes, locales, missing platforms, concurrent processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_aot.bin import precompile
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.environment import is_tpu_attached
from dflash_aot.runtime import Engine, SamplingParams
from tests.conftest import JAX_SWITCHES

TIMEOUT = 300  # seconds, for a busy machine
EXECUTABLES = 4  # of the smallest grid: prefill, verify, and kv_write for each
NOISE = re.compile("libtpu|TPU_|E0000|InitGoogle")  # what the TPU compiler prints on a machine without a TPU


def dflash(command: str, *arguments: str | Path, **options) -> subprocess.Popen:
    """The console script, its three streams in pipes."""
    script = Path(sys.executable).with_name(f"dflash-{command}")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([script, *map(str, arguments)], **{**pipes, **options})


def finish(process: subprocess.Popen, content: bytes = b"") -> tuple[int, str, str]:
    try:
        out, err = process.communicate(content, TIMEOUT)
    finally:
        process.kill()
    assert "Traceback" not in err.decode()
    return process.returncode, out.decode(), err.decode()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)


def test_ctrl_c_in_a_chat_exits_cleanly(bundle, chatting_target):
    """While text is generated, or, after a fast answer, while the command waits for input."""
    process = dflash("run", f"--bundle={bundle('tiny')}", f"--target={chatting_target}", "--chat", "--k=0")
    process.stdin.write(b"def bundle\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert err.splitlines()[-1] == "dflash-run: interrupted"


def test_ctrl_c_during_imports_exits_cleanly(bundle):
    process = dflash("run", f"--bundle={bundle('tiny')}", "--prompt=a")
    maps = Path(f"/proc/{process.pid}/maps")
    wait_for(lambda: "jaxlib" in maps.read_text(), process)
    process.send_signal(signal.SIGINT)
    code, _, _ = finish(process)
    assert code in (130, -signal.SIGINT)  # a shell reports both as 130


def test_ctrl_c_ends_a_starting_server(bundle):
    """The signal goes to the process group, as a terminal sends it."""
    process = dflash("serve", f"--bundle={bundle('tiny')}", "--port=0", start_new_session=True)
    try:
        assert any("weights ..." in line.decode() for line in process.stderr)
        os.killpg(process.pid, signal.SIGINT)
    finally:
        code, _, err = finish(process)
    assert code == 130 and err.splitlines()[-1] == "dflash-serve: interrupted"


@pytest.mark.parametrize(
    ("closed", "code", "out", "err"),
    [
        (">&-", 2, "", "dflash-run: standard output is closed: open it, or redirect it to a file\n"),
        ("2>&-", 0, "text", ""),
        (">&- 2>&- <&-", 2, "", ""),
    ],
)
def test_closed_standard_streams(bundle, speaking_target, closed, code, out, err):
    script = Path(sys.executable).with_name("dflash-run")
    flags = f"--bundle={bundle('tiny')} --target={speaking_target} --prompt=def --max_tokens=2"
    stats = "--stats" if closed == "2>&-" else ""
    done = subprocess.run(f"{script} {flags} {stats} {closed}", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, err)
    assert bool(done.stdout) == bool(out) and "start-up" not in done.stdout


def test_input_that_is_standard_output_is_refused(bundle, tmp_path):
    """With >> the shell leaves the file as it is; each answer would become a request."""
    lines = tmp_path / "lines"
    lines.write_text('{"prompt_ids": [3, 1, 4]}\n')
    with lines.open("a") as appended:
        process = dflash("run", f"--bundle={bundle('tiny')}", f"--input={lines}", stdout=appended)
        _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2 and f"standard output is the same file as --input {lines}" in err.decode()
    assert lines.read_text() == '{"prompt_ids": [3, 1, 4]}\n'


def test_interrupted_build_is_resumed(command, tied, tmp_path):
    flags = [f"--target={tied.target}", f"--draft={tied.draft}", f"--bundle={tmp_path}", "--platform=cpu", "--jobs=1"]
    flags += ["--buckets=batch=1 length=16 k=0 prefill=4", "--sampling=greedy"]

    def build_until(records: int) -> subprocess.Popen:
        process = dflash("precompile", *flags)
        wait_for(lambda: len(list(tmp_path.glob("entries/*.json"))) >= records, process)
        process.send_signal(signal.SIGSTOP)
        return process

    process = build_until(1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    assert finish(process)[0] == 130
    process = build_until(EXECUTABLES)
    done = command(precompile, *flags)
    assert done.code == 5 and f"{tmp_path}: another dflash-precompile or dflash-bundle is at work here" in done.err
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert not (tmp_path / "manifest.json").exists()
    code, _, err = finish(dflash("precompile", *flags))
    assert code == 0 and f"nothing to compile: all {EXECUTABLES} were there already" in err
    assert all(entry.self_test for entry in read_manifest(tmp_path).entries)
    assert list(tmp_path.rglob("*.unfinished")) == []


def test_processes_share_a_bundle_without_changing_it(copy, tmp_path):
    (tmp_path / "lines").write_text('{"prompt_ids": [3, 1, 4, 1, 5], "max_tokens": 12}\n')
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in [copy, *copy.rglob("*")]}
    with Engine.open(copy) as engine:
        arguments = [f"--bundle={copy}", f"--input={tmp_path / 'lines'}"]
        code, out, _ = finish(dflash("run", *arguments, env={**os.environ, **JAX_SWITCHES}))
        served = engine.generate([3, 1, 4, 1, 5], SamplingParams(max_tokens=12))
    assert code == 0 and tuple(json.loads(out)["token_ids"]) == tuple(served.token_ids)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in [copy, *copy.rglob("*")]} == before


@pytest.mark.skipif(is_tpu_attached(), reason="a TPU is attached")
def test_plan_does_not_start_the_tpu_compiler(tied):
    chosen_by_jax = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    plan = [f"--target={tied.target}", f"--draft={tied.draft}", "--plan"]
    code, _, err = finish(dflash("precompile", *plan, env=chosen_by_jax | JAX_SWITCHES))
    assert code == 0 and "executables" in err and not NOISE.search(err)


def test_invalid_variable_of_jax_is_named():
    code, _, err = finish(dflash("run", env={**os.environ, "JAX_DEBUG_NANS": "maybe"}))
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("dflash-run: JAX does not start: ") and "JAX_DEBUG_NANS" in err


def test_closed_output_pipe_is_not_an_error(bundle):
    process = dflash("run", f"--bundle={bundle('served')}", "--prompt=def bundle", "--k=0")
    assert process.stdout.read(1)
    process.stdout.close()
    try:
        err = process.stderr.read().decode()
        assert (process.wait(TIMEOUT), err) == (0, "")
    finally:
        process.kill()


def test_output_is_utf_8_in_every_locale(bundle, speaking_target):
    """A locale that cannot hold the text must not end it; nor does a prompt that is no text get anywhere."""
    where = [f"--bundle={bundle('tiny')}", f"--target={speaking_target}"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    code, out, err = finish(dflash("run", *where, "--stats", env=ascii_only), "é".encode())
    assert (code, "τ" in err or "\\u03c4" in err) == (0, True)
    assert out.endswith("\n") and len(out) > 1
