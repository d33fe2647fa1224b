"""Unknown flags are refused before JAX is imported, by names that are those of the commands."""

import pytest

from dflash_aot.bin import bench, bundle, precompile, run, serve
from dflash_aot.bin.command_line import PATH_FLAGS
from dflash_aot.bin.console_scripts import FLAG_NAMES, find_unknown_flag
from tests.bin.test_processes import dflash, finish

ALL = (bench, bundle, precompile, run, serve)
MODULES = {"dflash-precompile": precompile, "dflash-run": run, "dflash-serve": serve}
NAMES = {"bundle", "k", "json"}


@pytest.mark.parametrize("command", MODULES)
def test_flag_names_are_those_of_the_command(command):
    assert set(MODULES[command].FLAGS) == FLAG_NAMES[command]


GIVEN = [
    (["--budle=x"], "budle"),
    (["--bundle=x", "--k=3", "--kk", "3"], "kk"),
    (["--jsonn"], "jsonn"),
    (["--bundle", "x", "--nojson", "--k=-1", "--help"], None),
    (["--bundle", "--json-is-a-name"], None),  # the value of --bundle
    (["--", "--budle"], None),
    (["-budle", "--k"], None),  # one dash may begin a number: the command reads it
]


def test_unknown_flag_is_found():
    for arguments, unknown in GIVEN:
        message = find_unknown_flag(arguments, NAMES)
        assert message is None if unknown is None else message.startswith(f"Unknown command line flag '{unknown}'")


@pytest.mark.parametrize("command", ["run", "precompile", "serve"])
def test_unknown_flag_is_refused_without_importing_jax(command, monkeypatch):
    monkeypatch.setenv("PYTHONVERBOSE", "1")
    code, _, told = finish(dflash(command, "--bundel=x"))
    assert code == 2 and "Unknown command line flag 'bundel'. Did you mean: bundle ?" in told
    assert "import 'absl.flags'" in told and "import 'jax" not in told


EMPTY_PATHS = [
    (precompile, ["--store="]),
    (precompile, ["--target=", "--draft=x"]),
    (run, ["--prompt=x", "--bundle="]),
    (serve, ["--api_keys", ""]),
    (bundle, ["verify", "nowhere", "--golden="]),
]


def test_empty_path_is_refused(command):
    """As an unset shell variable leaves it: no default takes its place, and no check is left out."""
    for module, arguments in EMPTY_PATHS:
        done = command(module, *arguments)
        assert (
            done.code == 2
            and " is empty: name something, or leave the flag out. Is a shell variable unset?" in done.err
        )


def test_flags_that_must_not_be_empty_exist():
    known = set().union(*(module.FLAGS for module in ALL if hasattr(module, "FLAGS")))
    assert known >= PATH_FLAGS


def test_help_has_the_flags_of_its_command(command):
    for module, flag in ((bundle, "key"), (precompile, "buckets"), (run, "min_p"), (serve, "served_model_name")):
        done = command(module, "--help")
        assert done.code == 0 and f"--{flag}:" in done.out
