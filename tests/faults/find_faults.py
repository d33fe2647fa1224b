"""Which faults of faults.toml do the tests find? Not collected by pytest.

.venv/bin/python tests/faults/find_faults.py                 # all faults; a second run goes on where the first ended
.venv/bin/python tests/faults/find_faults.py --only cache "NAME OF A FAULT" --again

Each fault changes one line in a copy of the checkout. Its tests then import the copy, also in their subprocesses. A
fault is found if one of them fails that passes without the fault.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
ROOMS = ("cache", "compile", "runtime", "server", "benchmarks", "bin")
BUILDS = ("cache", "compile")  # with a fault of these rooms, bundles are built anew
PRELOADED = ("jax", "jax.export", "flax.nnx", "hypothesis", "tokenizers", "fastapi", "uvicorn", "llguidance")
BUNDLES = Path("d/dflash-bundles")  # in pytest's cache


def link_or_copy(source: str, target: str) -> None:
    """Files of bundles are never written in place, except for locks."""
    try:
        if source.endswith(".lock"):
            raise OSError
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def make_copy(folder: Path) -> None:
    """Copies the checkout, and makes the copy importable by `folder/imports`."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (CHECKOUT / name).exists():
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / "copy" / name)
    (folder / "imports/dflash_aot").mkdir(parents=True)
    for room in ROOMS:
        (folder / "imports/dflash_aot" / room).symlink_to(folder / "copy" / room)


def find_place(copy: Path, fault: dict) -> Path:
    """The only file of the room with the line to change. Raises LookupError for a fault that is out of date."""
    found = [path for path in (copy / fault["room"]).rglob("*.py") for _ in range(path.read_text().count(fault["old"]))]
    if len(found) != 1:
        raise LookupError(f"{fault['name']}: {len(found)} places in {fault['room']}/ have {fault['old']!r}")
    if missing := [test for test in fault["tests"] if not (copy / test.partition("::")[0]).exists()]:
        raise LookupError(f"{fault['name']}: there is no {missing[0]}")
    return found[0]


def list_outdated(copy: Path, faults: list[dict]) -> Iterator[str]:
    for fault in faults:
        try:
            find_place(copy, fault)
        except LookupError as error:
            yield str(error)


class Runner:
    def __init__(self, folder: Path, seconds: int, passing: set[str]):
        """passing: tests that are known to pass without a fault."""
        self.folder, self.seconds, self.passing = folder, seconds, passing
        self.clean = folder / "clean"  # pytest's cache, with bundles that no fault changes
        (self.clean / BUNDLES).mkdir(parents=True)
        (CHECKOUT / ".pytest_cache" / BUNDLES / "store").mkdir(parents=True, exist_ok=True)
        (self.clean / BUNDLES / "store").symlink_to(CHECKOUT / ".pytest_cache" / BUNDLES / "store")

    def run(self, options: list[str], cache: Path | None = None) -> tuple[bool, str | None, float]:
        """Runs pytest in a fork: whether it was ended at the time limit, the first test that failed, its seconds."""
        began, ended, status = time.monotonic(), 0, 0
        with tempfile.TemporaryFile("w+") as file:
            child = os.fork()
            if not child:
                self.become_pytest(file.fileno(), ["-o", f"cache_dir={cache or self.clean}", *options], bool(cache))
            try:
                while not ended and time.monotonic() < began + self.seconds:
                    time.sleep(0.05)
                    ended, status = os.waitpid(child, os.WNOHANG)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)  # and what its tests left running
            if not ended:
                os.waitpid(child, 0)
            file.seek(0)
            output = file.read()
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
        if status and not failed:
            sys.exit(f"pytest ended with {status}:\n{output}")
        return not ended, failed[1] if failed else None, time.monotonic() - began

    def become_pytest(self, output: int, options: list[str], is_faulty: bool) -> NoReturn:
        """Bundles that a run without a fault has built are used as they are."""
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.folder / "copy")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.path[0] = os.environ["PYTHONPATH"] = str(self.folder / "imports")
        os.environ["PYTEST_XDIST_TESTRUNUID"] = "faulty" if is_faulty else "clean"
        code = pytest.main(["-x", "-q", "-rfE", "--tb=line", *options])
        sys.stdout.flush()
        os._exit(code)

    def run_faulty(self, fault: dict, options: list[str]) -> tuple[bool, str | None, float]:
        """Runs pytest with a fault. A fault that may change a bundle has bundles and a store of its own."""
        path = find_place(self.folder / "copy", fault)
        original, status, cache = path.read_text(), path.stat(), None
        if fault["room"] in BUILDS or "self_test" in str(path):
            cache = self.folder / "faulty"
            shutil.copytree(self.clean, cache, copy_function=link_or_copy)
        path.write_text(original.replace(fault["old"], fault["new"]))
        os.utime(path, (0, hash(fault["name"]) % 2**30))  # bytecode is compiled again
        found = self.run(options, cache)
        path.write_text(original)
        os.utime(path, (status.st_atime, status.st_mtime))
        if cache:
            shutil.rmtree(cache, ignore_errors=True)
        return found

    def judge(self, fault: dict, tests: list[str]) -> dict | None:
        """A row of the table; None where the tests take too long without the fault, too."""
        by, timed_out, seconds, failing = None, False, 0.0, list[str]()
        pending = [*tests]
        while pending and not by:
            options = [*(f"--deselect={test}" for test in failing), pending[0]]
            timed_out, by, more = self.run_faulty(fault, options)
            seconds += more
            if timed_out and not by:
                if self.run(options)[0]:
                    return None
                by = f"more than {self.seconds} s"
            elif not by:
                pending.pop(0)
            elif by not in self.passing and self.run([by])[1]:
                print(f"fails without a fault: {by}", flush=True)
                failing.append(by)
                by = None
            else:
                self.passing.add(by)
        facts = {"name": fault["name"], "room": fault["room"], "found": bool(by), "by": by}
        return {**facts, "timed_out": timed_out, "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )
    parser.add_argument(
        "--only", nargs="+", default=ROOMS, metavar="NAME", help="these faults, or those of these rooms"
    )
    parser.add_argument("--again", action="store_true", help="also those that the result has already")
    parser.add_argument("--room", action="store_true", help="all tests of the room where the listed ones find nothing")
    parser.add_argument("--result", type=Path, default=CHECKOUT / "build/faults.json", help="the table, as JSON")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a fault's tests; longer counts as found")
    parser.add_argument("--stop_after", type=int, default=10**6, help="seconds after which no fault is begun")
    arguments = parser.parse_args()
    faults = tomllib.loads((Path(__file__).parent / "faults.toml").read_text())["fault"]
    known = {row["name"]: row for row in json.loads(arguments.result.read_text())} if arguments.result.exists() else {}
    chosen = [fault for fault in faults if {fault["name"], fault["room"]} & set(arguments.only)]
    chosen = [fault for fault in chosen if arguments.again or fault["name"] not in known]
    for module in PRELOADED:  # once, and not in each fork
        importlib.import_module(module)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends pytest, and removes the copy
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dflash-faults-") as directory:
        make_copy(Path(directory))
        if outdated := "\n".join(list_outdated(Path(directory) / "copy", faults)):
            sys.exit(outdated)
        runner = Runner(Path(directory), arguments.timeout, {row["by"] for row in known.values()})
        for fault in chosen:
            if time.monotonic() - began > arguments.stop_after:
                break
            row = runner.judge(fault, fault["tests"])
            if arguments.room and row and not row["found"]:
                row = runner.judge(fault, [f"tests/{fault['room']}"])
            if row is None:
                print(f"not judged within {arguments.timeout} s:", fault["name"], flush=True)
                continue
            known[row["name"]] = row
            rows = [known[one["name"]] for one in faults if one["name"] in known]
            arguments.result.parent.mkdir(parents=True, exist_ok=True)
            arguments.result.write_text(json.dumps(rows, indent=1) + "\n")
            print("found " if row["found"] else "MISSED", row["name"], "|", row["by"], row["seconds"], flush=True)
    rows = [known[fault["name"]] for fault in faults if fault["name"] in known]
    print(f"{sum(row['found'] for row in rows)} of {len(rows)} found; {len(faults)} are listed")


if __name__ == "__main__":
    main()
