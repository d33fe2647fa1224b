"""The README's commands, executed in their order in a fresh clone, as a reader pastes them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROOMS = ("bin", "cache", "compile", "runtime", "server", "benchmarks")
TIMEOUT = 540  # seconds, for a busy machine
PUBLISHED = {"Qwen/Qwen3-4B": "target", "z-lab/Qwen3-4B-DFlash-b16": "draft"}
# Of TPU executables only the plan is tested here; tests/bin/test_emulation.py builds them. Of other grids a small part,
# without sampling, which the quickstart's bundle has.
SMALL_PART = '"batch=1 length=1024 k=0,15 prefill=256" --sampling greedy'
INSTEAD = {
    "dflash-precompile .*--topology .*": r"\g<0> --plan",
    '(dflash-precompile (?!.*--topology).*--buckets )"[^"]*"': rf"\1{SMALL_PART}",
}
LEFT_OUT = ("pip install",)  # changes the environment that these tests run in


def read_commands(kind: str) -> Iterator[str]:
    """The commands of the README's blocks of a kind, continuation lines joined, comments left out."""
    for name, block in BLOCK.findall((REPOSITORY / "README.md").read_text()):
        if name == kind:
            yield from (re.sub(r"\s+# .*", "", line) for line in block.replace("\\\n", " ").splitlines())


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository in another place. Its .venv is the environment of these tests, so that nothing is installed."""
    directory = tmp_path_factory.mktemp("clone")
    for name in (*ROOMS, "pyproject.toml", "constraints.txt"):
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy2
        copy(REPOSITORY / name, directory / name)
    environment, scripts = directory / ".venv", directory / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("lib", "pyvenv.cfg"):
        (environment / name).symlink_to(Path(sys.prefix) / name)
    for path in (Path(sys.prefix) / "bin").iterdir():
        (scripts / path.name).symlink_to(path)
    if not (scripts / "pip").exists():
        (scripts / "pip").symlink_to("/bin/false")  # must be there, and is not called
    (environment / ".run").touch()  # what quickstart.sh writes after an installation
    return directory


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, speaking_target: Path, tied) -> Path:
    """A Hugging Face cache with a small pair under the names of the published pair, whose blocks have 16 tokens."""
    home = tmp_path_factory.mktemp("hub")
    for name, role in PUBLISHED.items():
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        shutil.copytree(speaking_target if role == "target" else tied.draft, folder / "snapshots" / ("0" * 40))
    config = folder / "snapshots" / ("0" * 40) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "block_size": 16}))
    return home


@pytest.fixture
def environment(hub: Path, tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "DFLASH_API_KEY")}
    return {**kept, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path), "SHELL": "/bin/bash"}


def run(command: str, clone: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def serve(command: str, clone: Path, environment: dict[str, str]) -> None:
    """Runs a server until it is ready, then ends it as Ctrl-C does."""
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=clone, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr and any("ready after" in line for line in process.stderr)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode in (130, -signal.SIGINT)


@pytest.mark.slow
def test_commands_of_the_readme_work_in_their_order(clone, environment):
    """The quickstart also prints how to go on: these commands are run too. A shell keeps what `source` sets."""
    shell, said = [], ""
    commands = list(read_commands(""))
    assert commands[0] == "bash bin/quickstart.sh" and any(command.startswith("hf ") for command in commands)
    for command in commands:
        if command.startswith(LEFT_OUT):
            continue
        for pattern, instead in INSTEAD.items():
            command = re.sub(pattern, instead, command)
        pasted = "; ".join([*shell, command])
        if command.startswith("source "):
            shell.append(command)
        elif command.startswith("dflash-serve "):
            serve(f"{pasted} --port 0", clone, environment)
        else:
            done = run(pasted, clone, environment)
            said = said or done.stderr
    readme = (REPOSITORY / "README.md").read_text()
    assert not re.search("canar|anchor|kv-write", said + readme)  # words that a newcomer has not met
    go_on = re.findall(r"^  (\S.*)", said.partition("go on:")[2], re.MULTILINE)
    assert [line.split()[0] for line in go_on] == ["source", "dflash-serve", "dflash-precompile"]
    assert go_on[0] in commands and go_on[1] in commands
    run(f"{go_on[0]}; {go_on[2]} --plan", clone, environment)


@pytest.mark.slow
def test_quickstart_runs_from_elsewhere(clone, environment, tmp_path):
    done = run(f"cd {tmp_path}; bash {clone}/bin/quickstart.sh 'import os'", clone, environment)
    activate, *_ = re.findall(r"^  (source .*)", done.stderr, re.MULTILINE)
    dflash_run = f"dflash-run --bundle {clone}/build/bundle --prompt a --max_tokens 1"
    run(f"cd {tmp_path}; {activate}; {dflash_run}", clone, environment)


@pytest.mark.slow
def test_python_of_the_readme_runs(clone, environment):
    (source,) = (block for name, block in BLOCK.findall((REPOSITORY / "README.md").read_text()) if name == "python")
    (clone / "readme.py").write_text(source)
    run("test -d build/bundle || bash bin/quickstart.sh; .venv/bin/python readme.py", clone, environment)
